"""GGUF files, written here by the gguf package from golden models, give those models again."""

import math

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests import small
from tests.interop.make_golden import GOLDEN
from transformer.errors import UserError
from transformer.interop.gguf_file import AFTER, BLOCK, ENDS
from transformer.interop.gguf_rope import scaling
from transformer.interop.importing import look, read_params
from transformer.interop.source import Safetensors
from transformer.model.positions import Llama3, Rotary

UNQUANTISED = {"F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}
QUANTISED = {"Q8_0": Kind.Q8_0, "Q4_0": Kind.Q4_0, "Q4_1": Kind.Q4_1, "Q5_0": Kind.Q5_0}


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """As the converter of Llama checkpoints does: row h of a half and its partner side by side."""
    out = np.empty_like(w)
    size = w.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = w[head * size + i]
            out[head * size + 2 * i + 1] = w[head * size + size // 2 + i]
    return out


def write(path, name, arch, kind, change=lambda fields: None, divisors=None):
    """The golden model ``name`` as a GGUF file; ``divisors`` of its rotary angles."""
    model, source = look(GOLDEN / name).experiment.model, Safetensors(GOLDEN / name)
    heads = {"q_proj": model.heads, "k_proj": model.attention.projection.kv_count(model.heads)}
    fields = {
        "embedding_length": model.width,
        "block_count": model.depth,
        "feed_forward_length": model.mlp.width,
        "context_length": model.context,
        "attention.head_count": model.heads,
        "attention.head_count_kv": heads["k_proj"],
        "attention.layer_norm_rms_epsilon": model.norm.epsilon,
        "rope.freq_base": model.positions.base,
    }
    change(fields)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrst"])
    writer.add_token_scores([0.0] * 23)
    writer.add_token_types([2, 3, 3, *[1] * 20])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    mine = BLOCK if arch == "llama" else BLOCK | AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
    stems = {theirs: ours for ours, theirs in {**ENDS, **mine}.items()}
    for tensor in source.shapes:
        data = source.read(tensor)
        stem, _, last = tensor.rpartition(".")
        for part, count in heads.items() if arch == "llama" else ():
            data = interleaved(data, count) if part in stem else data
        data = data + 1 if arch.startswith("gemma") and "norm" in stem else data
        if stem.startswith("model.layers."):
            _, _, i, own = stem.split(".", 3)
            stem = f"blk.{i}.{stems[own]}"
        else:
            stem = stems[stem]
        writer.add_tensor(f"{stem}.{last}", gguf.quants.quantize(data, kind), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", UNQUANTISED)
def test_a_llama_file_is_the_model_it_was_made_of(kind, tmp_path):
    write(tmp_path / "a.gguf", "llama", "llama", UNQUANTISED[kind])
    found, wanted = look(tmp_path / "a.gguf"), look(GOLDEN / "llama")
    assert found.experiment.model.positions == wanted.experiment.model.positions
    assert found.experiment.model.attention == wanted.experiment.model.attention
    error = small.farthest(read_params(found), read_params(wanted))
    assert error == 0 if kind == "F32" else 0 < error < 4e-3
    tokenizer = found.published.tokenizer.tokenizer(23)
    assert tokenizer.start_id == 1 and tokenizer.end_ids == (2,)


def test_a_gemma_file_is_the_model_it_was_made_of(tmp_path):
    def more(fields):
        fields |= {"attention.sliding_window": 5, "attention.key_length": 6, "attn_logit_softcapping": 3.0}
        fields |= {"final_logit_softcapping": 4.0}

    write(tmp_path / "a.gguf", "gemma2", "gemma2", Kind.F32, more)
    found, wanted = look(tmp_path / "a.gguf"), look(GOLDEN / "gemma2")
    for part in ("span", "scores", "projection"):
        assert getattr(found.experiment.model.attention, part) == getattr(wanted.experiment.model.attention, part)
    assert small.farthest(read_params(found), read_params(wanted)) < 1e-6  # one is added, and taken off again


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_blocks_are_what_they_stand_for(kind, tmp_path):
    """A tensor of whole blocks; the others of this small model are too narrow to be quantised."""
    from transformer.interop.gguf_file import Gguf

    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    data = gguf.quants.quantize(values, QUANTISED[kind])
    writer.add_tensor("output.weight", data, raw_dtype=QUANTISED[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = Gguf(tmp_path / "a.gguf", gguf.GGUFReader(tmp_path / "a.gguf"), BLOCK, {})
    assert source.shapes == {"lm_head.weight": (4, 64)}
    steps = {"Q8_0": 254, "Q4_0": 16, "Q4_1": 15, "Q5_0": 32}[kind]
    found = source.read("lm_head.weight").reshape(4, 2, 32)
    spread = 2 * np.abs(values.reshape(4, 2, 32)).max(-1, keepdims=True)
    assert 0 < np.abs(found - values.reshape(found.shape)).max() <= (spread / steps).max() * 1.01


def llama3_divisors(factor: float, head: int, base: float) -> list[float]:
    """As the converter of Llama 3.1 to 3.3 makes them: an angle at a time, by the length of its wave."""
    found = []
    for i in range(0, head, 2):
        wave = 2 * math.pi * base ** (i / head)
        smooth = (8192 / wave - 1) / (4 - 1)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize("factor, head, base", [(8.0, 128, 5e5), (32.0, 64, 5e5)])
def test_divisors_of_angles_are_llama_3s_scaling_or_refused(factor, head, base):
    divisors = llama3_divisors(factor, head, base)
    assert len({round(d, 3) for d in divisors}) > 3, "some are between"
    found = scaling("a.gguf", np.array(divisors, np.float32), head, base)
    wanted = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert found == {"rope_type": "llama3", "original_max_position_embeddings": 8192, **wanted}
    assert scaling("a.gguf", np.ones(head // 2), head, base) is None
    between = next(i for i, d in enumerate(divisors) if 1 < d < factor)
    for other in (
        divisors[:-1],
        [d * (1 + 1e-3 * (i == between)) for i, d in enumerate(divisors)],
        [0.0] * (head // 2),
    ):
        with pytest.raises(UserError, match=r"a.gguf: rope_freqs.weight"):
            scaling("a.gguf", np.array(other, np.float32), head, base)


def test_a_llama_3_file_has_its_scaling(tmp_path):
    def far(fields):
        fields["rope.freq_base"] = 1e8

    write(tmp_path / "a.gguf", "llama", "llama", Kind.F32, far, divisors=[1, 8])
    found = look(tmp_path / "a.gguf")
    assert found.experiment.model.positions == Rotary(base=1e8, scaling=Llama3(factor=8.0, original_context=8192))
    assert small.farthest(read_params(found), read_params(look(GOLDEN / "llama"))) == 0
    write(tmp_path / "b.gguf", "llama", "llama", Kind.F32, far, divisors=[2, 8])
    with pytest.raises(UserError, match="is not the scaling of Llama 3"):
        look(tmp_path / "b.gguf")

    write(tmp_path / "c.gguf", "llama", "qwen2", Kind.F32, far, divisors=[1, 8])
    with pytest.raises(UserError, match=r"rope_freqs.weight is known in float32, of llama"):
        look(tmp_path / "c.gguf")


def test_what_is_not_known_in_a_file_is_refused_by_name(tmp_path):
    def said(change, arch="llama"):
        write(tmp_path / "a.gguf", "llama", arch, Kind.F32, change)
        with pytest.raises(UserError) as refused:
            read_params(look(tmp_path / "a.gguf"))
        return str(refused.value)

    assert "llama.expert_count=8 is not known here" in said(lambda f: f.update(expert_count=8))
    assert "rope.dimension_count=2 is not the heads' width" in said(lambda f: f.update({"rope.dimension_count": 2}))
    assert "has the shape" in said(lambda f: f.update({"feed_forward_length": 25}))
    data = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        look(tmp_path / "cut.gguf")
