"""The keys of a published config.json: each is read, or known to do nothing here, or refused by name."""

from collections.abc import Iterable
from typing import Any

from transformer.errors import UserError

# Without effect on what the model computes from tokens: names, training, other heads' settings, how things are run.
WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "n_ctx",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "return_dict",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
    }
)
LARGEST = 1 << 31


class Keys:
    """A config.json that remembers what was asked of it."""

    def __init__(self, where: str, values: dict[str, Any]):
        self.where, self._values, self._read = where, values, set[str]()

    def refuse(self, name: str, why: str) -> UserError:
        return UserError(f"{self.where}: {name}={self._values.get(name)!r}: {why}")

    def take(self, name: str, usual: Any = None) -> Any:
        """The value, or the usual one where the key is absent or null."""
        self._read.add(name)
        value = self._values.get(name)
        return usual if value is None else value

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def given(self, name: str) -> bool:
        """Whether the key is there, null or not."""
        return name in self._values

    def _checked(self, name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise UserError(f"{self.where}: {name} must be {what}, found {value!r}")
        return value

    def whole(self, name: str, usual: int | None = None) -> int:
        value: int = self._checked(name, self.take(name, usual), int, "a whole number")
        if not 0 < value < LARGEST:
            raise UserError(f"{self.where}: {name} must be from 1 to {LARGEST - 1}, found {value}")
        return value

    def number(self, name: str, usual: float | None = None) -> float:
        return float(self._checked(name, self.take(name, usual), (int, float), "a number"))

    def flag(self, name: str, usual: bool) -> bool:
        return bool(self._checked(name, self.take(name, usual), bool, "true or false"))

    def text(self, name: str, usual: str | None = None) -> str:
        return str(self._checked(name, self.take(name, usual), str, "text"))

    def group(self, name: str) -> dict[str, Any]:
        """An object, empty where there is none."""
        found: dict[str, Any] = self._checked(name, self.take(name, {}), dict, "an object")
        return found

    def must_be(self, name: str, *values: Any) -> None:
        """Refuse any other value: this codebase has nothing of the kind."""
        if self.take(name, values[0]) not in values:
            raise self.refuse(name, "this codebase has no such option")

    def done(self, known: Iterable[str] = ()) -> None:
        """Refuse keys that nobody asked for and that are not known to do nothing."""
        unknown = sorted(self._values.keys() - self._read - WITHOUT_EFFECT - set(known))
        if unknown:
            raise UserError(
                f"{self.where}: {unknown[0]}={self._values[unknown[0]]!r} is not known here: it may change the result"
            )
