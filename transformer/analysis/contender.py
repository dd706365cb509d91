"""One contender of a speed comparison, in a process of its own: it prepares, then does its work once for each "go".

    python -m transformer.analysis.contender '{"who": "ours", "what": "train", "size": "S", "dtype": "float32"}'

Lines of JSON on standard output: ready; then the seconds of each piece of work; after "end" the largest resident
size in bytes. Whoever reads them lets contenders take turns, so that all meet the same machine.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from transformer.allocator import keep_freed_memory

# Width, blocks, heads, context, vocabulary, rows.
SIZES = {"S": (128, 4, 4, 256, 4096, 16), "M": (384, 6, 6, 256, 8192, 16), "L": (512, 8, 8, 512, 32000, 4)}
PROMPT = 32  # tokens before those that are generated, up to the context
WIDTH, HEADS, BLOCKS = 256, 4, 2  # of the comparison of attention alone
Work = Callable[[], None]


def experiment(size: str, dtype: str, **model: Any) -> Any:
    """GPT-2 of that size: biases, LayerNorm, tied tables, AdamW."""
    from transformer.config import Experiment
    from transformer.data.tokenizer import Bpe
    from transformer.model.config import Model
    from transformer.training.config import Train

    D, L, N, T, V, B = SIZES[size]
    sizes: Any = {"depth": L, "width": D, "heads": N, "context": T, "bias": True, "tie_embeddings": True}
    return Experiment(
        model=Model(**(sizes | {"dtype": dtype} | model)), tokenizer=Bpe(vocab_size=V), train=Train(batch=B)
    )


def ours_train(size: str, dtype: str, **model: Any) -> Work:
    """One training step. The first piece of work compiles."""
    import jax

    from transformer.analysis.bench import random_batch
    from transformer.training.state import fresh_state
    from transformer.training.step import make_step

    e = experiment(size, dtype, **model)
    batch = random_batch(e)
    step = make_step()
    state = fresh_state(e)

    def work() -> None:
        nonlocal state
        state, metrics = step(e, state, batch)
        jax.block_until_ready(metrics)

    return work


def ours_generate(size: str, dtype: str, rows: int) -> Work:
    """Greedy continuation of ``rows`` prompts to the end of the context, with the cache."""

    from transformer.generation.decode import Generator, continue_prompts
    from transformer.generation.sampling import Sampling
    from transformer.training.state import fresh_state

    e = experiment(size, dtype)
    params = fresh_state(e).params
    generator = Generator(e, Sampling(temperature=0.0), end_ids=())
    prompts = [[1] * PROMPT] * rows

    def work() -> None:
        for _ in continue_prompts(generator, params, prompts, e.model.context - PROMPT):
            pass

    return work


def ours_attention(context: int, kernel: str) -> Work:
    """Forward and backward of BLOCKS layers of attention alone."""
    import jax

    from transformer.model.kernels import attend
    from transformer.model.masks import causal

    H = WIDTH // HEADS
    q, k, v, more = jax.random.normal(jax.random.key(0), (4, 1, context, HEADS, H))

    @jax.jit
    def gradients(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            for _ in range(BLOCKS):
                q = attend(kernel, q[:, :, :, None], k, v, causal(context))[:, :, :, 0]
            return (q * more).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    return lambda: jax.block_until_ready(gradients(q, k, v)) and None


def _gpt2(size: str) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    D, L, N, T, V, _ = SIZES[size]
    dropout: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=L, n_head=N, **dropout))


def peer_train(size: str) -> Work:
    import torch

    *_, T, V, B = SIZES[size]
    model = _gpt2(size).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(0, V, (B, T))

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return work


def peer_generate(size: str, rows: int) -> Work:
    import torch

    model, new = _gpt2(size).eval(), SIZES[size][3] - PROMPT
    ids = torch.ones((rows, PROMPT), dtype=torch.long)
    options: Any = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}

    def work() -> None:
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options)

    return work


def peer_attention(context: int) -> Work:
    import torch

    q, k, v, more = (torch.randn(1, HEADS, context, WIDTH // HEADS, requires_grad=True) for _ in range(4))

    def work() -> None:
        x = q
        for _ in range(BLOCKS):
            x = torch.nn.functional.scaled_dot_product_attention(x, k, v, is_causal=True)
        torch.autograd.grad((x * more).sum(), (q, k, v))

    return work


CONTENDERS: dict[str, Callable[..., Work]] = {
    f.__name__: f for f in (ours_train, ours_generate, ours_attention, peer_train, peer_generate, peer_attention)
}


def main(argument: str) -> None:
    asked = json.loads(argument)
    kind = CONTENDERS[f"{asked.pop('who')}_{asked.pop('what')}"]
    if kind.__name__.startswith("ours"):
        import jax

        from transformer.parallel.mesh import Mesh, make_mesh

        jax.set_mesh(make_mesh(Mesh()))  # for the rest of the process
    work = kind(**asked)
    _tell({"ready": True})
    for line in sys.stdin:
        if line == "end\n":
            break
        begun = time.perf_counter()
        work()
        _tell({"seconds": time.perf_counter() - begun})
    _tell({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if json.loads(sys.argv[1])["who"] == "ours":  # a peer is measured as it is shipped
        keep_freed_memory()
    main(sys.argv[1])
