"""sample: continue prompts with a trained run."""

from typing import Any

from absl import flags

from transformer.cli import Args, Command, define_cache, define_run
from transformer.errors import UserError


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
    import jax

    from transformer.data.tasks.task import Task
    from transformer.generation.sample import CHUNK, Stream, sample
    from transformer.parallel.mesh import Mesh, make_mesh
    from transformer.run import open_run

    prompts = f.prompt or [""]
    opened = open_run(directory).on_one_device()
    if isinstance(opened.experiment.data.source, Task):
        raise UserError(f"--run: {directory} was trained on a synthetic task: it answers, and continues nothing")
    streaming = len(prompts) == 1 and not f.json
    samples: list[Any] = []
    with jax.set_mesh(make_mesh(Mesh())):
        params, step = opened.params(f.checkpoint)
        stream = Stream(opened)
        found = sample(
            opened,
            params,
            prompts,
            sampling,
            new=f.tokens,
            seed=f.seed,
            use_cache=not f.no_cache,
            chunk=CHUNK if streaming else None,
        )
        for number, samples in enumerate(found):
            if streaming:
                if number == 0:  # not before the prompt is known to be a good one
                    print(prompts[0], end="")
                print(stream.more(samples[0].ids), end="", flush=True)
    if streaming:
        print(stream.more(samples[0].ids, final=True))
    result = {
        "run": str(directory),
        "step": step,
        "samples": [{"prompt": s.prompt, "text": s.text, "tokens": len(s.ids), "ended": s.ended} for s in samples],
    }
    text = "" if streaming else "\n\n".join(f"--- {i}\n{s.prompt}{s.text}" for i, s in enumerate(samples, 1))
    return result, text


COMMAND = Command(
    summary="continue prompts with a trained run",
    example="python -m transformer sample --run=runs/demo --prompt='HAMLET. ' --temperature=0.7",
    define=define,
    run=run,
)
