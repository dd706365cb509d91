"""sample: continue prompts with a trained run."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, define_int8, define_run
from transformer.errors import UserError
from transformer.files import where


def define(values: flags.FlagValues) -> None:
    define_run(values)
    define_cache(values)
    flags.DEFINE_multi_string("prompt", [], "text to continue; several are continued together", flag_values=values)
    flags.DEFINE_integer(
        "tokens", None, "how many to add; by default what fits the context, up to 256", flag_values=values
    )
    flags.DEFINE_float("temperature", 0.8, "0 takes the most likely token", flag_values=values)
    flags.DEFINE_integer("top_k", 0, "draw from the k most likely; 0: all", flag_values=values)
    flags.DEFINE_float(
        "top_p", 1.0, "draw from the most likely that reach this probability; 1: all", flag_values=values
    )
    flags.DEFINE_float("min_p", 0.0, "leave out tokens below this share of the most likely one's", flag_values=values)
    flags.DEFINE_float("repetition_penalty", 1.0, "above 1 makes repeated tokens less likely", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the draws", flag_values=values)
    flags.DEFINE_bool(
        "no_cache",
        False,
        "the tutorial's way: the whole text again for every token, same tokens",
        flag_values=values,
    )
    flags.DEFINE_integer("piece", 512, "tokens of a prompt that are read at once", flag_values=values)
    define_int8(values)
    flags.DEFINE_string("draft", None, "a smaller run that proposes tokens: faster, same chances", flag_values=values)
    flags.DEFINE_integer(
        "draft_blocks", None, "so many of the model's own first blocks propose tokens", flag_values=values
    )
    flags.DEFINE_integer("proposals", 4, "tokens that a draft proposes at a time", flag_values=values)


def run(args: Args) -> tuple[dict[str, Any], str]:
    f = args.flags
    directory = args.run_directory()
    from transformer.generation.sampling import Sampling, check

    sampling = Sampling(
        temperature=f.temperature,
        top_k=f.top_k,
        top_p=f.top_p,
        min_p=f.min_p,
        repetition_penalty=f.repetition_penalty,
    )
    check(sampling)
    for name in ("piece", "int8_cache", "draft", "draft_blocks"):
        if f.no_cache and f[name].present:
            raise UserError(f"--{name}: has no effect with --no_cache, which reads the whole text anew; leave it out")
    if f.draft and f.draft_blocks is not None:
        raise UserError("--draft and --draft_blocks: there is one draft, leave one of them out")
    if f["proposals"].present and not f.draft and f.draft_blocks is None:
        raise UserError("--proposals: has no effect without --draft=DIR or --draft_blocks=K; leave it out")
    import time

    import jax

    from transformer.generation import drafts
    from transformer.generation.sample import CHUNK, Stream, sample
    from transformer.parallel.mesh import Mesh, make_mesh
    from transformer.run import open_run

    prompts = f.prompt or [""]
    opened = open_run(directory).of_text().on_one_device()
    streaming = len(prompts) == 1 and not f.json
    samples: list[Any] = []
    with jax.set_mesh(make_mesh(Mesh())):
        params, step = opened.params(f.checkpoint)
        draft = None
        if f.draft:
            draft = drafts.of_run(opened, open_run(where("--draft", f.draft)).on_one_device(), f.proposals)
        elif f.draft_blocks is not None:
            draft = drafts.first_blocks(opened.experiment, params, f.draft_blocks, f.proposals)
        stream = Stream(opened)
        found = sample(
            opened,
            params,
            prompts,
            sampling,
            new=f.tokens,
            seed=f.seed,
            use_cache=not f.no_cache,
            piece=f.piece,
            int8=f.int8_cache,
            draft=draft,
            chunk=CHUNK if streaming else None,
        )
        begun = time.perf_counter()
        for number, samples in enumerate(found):
            if number == 0:
                begun = time.perf_counter()  # prompts are read, programs compiled
            if streaming:
                if number == 0:  # not before the prompt is known to be a good one
                    print(prompts[0], end="")
                print(stream.more(samples[0].ids), end="", flush=True)
    seconds = time.perf_counter() - begun
    if streaming:
        print(stream.more(samples[0].ids, final=True))
    result = {
        "run": str(directory),
        "step": step,
        "tokens_per_second": sum(len(s.ids) + s.ended for s in samples) / seconds,
        **({"acceptance": acceptance(samples)} if draft else {}),
        "samples": [{"prompt": s.prompt, "text": s.text, "tokens": len(s.ids), "ended": s.ended} for s in samples],
    }
    text = "" if streaming else "\n\n".join(f"--- {i}\n{s.prompt}{s.text}" for i, s in enumerate(samples, 1))
    return result, text


def acceptance(samples: list[Any]) -> float | None:
    """The share of the proposed tokens that became text; none where a text had no room for any."""
    proposed = sum(s.proposed for s in samples)
    return sum(s.accepted for s in samples) / proposed if proposed else None


COMMAND = Command(
    summary="continue prompts with a trained run",
    example="python -m transformer sample --run=runs/demo --prompt='HAMLET. ' --temperature=0.7",
    define=define,
    run=run,
)
