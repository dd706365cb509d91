"""The training's settings."""

from transformer.errors import UserError
from transformer.settings import settings
from transformer.training.optimizer import Adamw, Muon, Optimizer
from transformer.training.schedule import Constant, Cosine, Schedule, WarmupStableDecay


@settings
class Train:
    """How a model is trained, measured on the way, and kept. A step is one update of the weights."""

    steps: int = 1000
    batch: int = 16  # rows of one update
    accumulate: int = 1  # in how many parts a batch is worked through
    learning_rate: float = 1e-3
    warmup: int = 50  # steps
    schedule: Schedule = Cosine()
    optimizer: Optimizer = Adamw()
    weight_decay: float = 0.1
    clip: float | None = 1.0  # largest global norm of the gradient
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0  # of the initial weights and of dropout; data.seed is that of the order
    log_every: int = 10
    eval_every: int = 250  # also at the end
    eval_windows: int | None = 128  # of the validation split, evenly spread; none: all
    checkpoint_every: int = 250  # also at the end
    keep: int = 2  # newest checkpoints; the best one is kept besides
    max_skipped: int = 10  # steps with a loss or gradient that is not finite before the run stops
    init_from: str | None = None  # a run whose weights to start from; this is not how a run is resumed
    profile: tuple[int, ...] = ()  # first and last step to trace
    prompts: tuple[str, ...] = ("",)  # continued at the end


def check(train: Train) -> None:
    """UserError for numbers that cannot be trained with."""
    for name in (
        "steps",
        "batch",
        "accumulate",
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep",
        "max_skipped",
    ):
        if getattr(train, name) < 1:
            raise UserError(f"config.train.{name}: {getattr(train, name)} is too small, set 1 or more")
    if train.steps >= 1 << 31:
        raise UserError(f"config.train.steps: {train.steps} is too large, set up to {(1 << 31) - 1}")
    if train.batch % train.accumulate:
        raise UserError(
            f"config.train.accumulate: a batch of {train.batch} rows does not divide into {train.accumulate} parts"
        )
    if train.eval_windows is not None and train.eval_windows < 1:
        raise UserError(f"config.train.eval_windows: {train.eval_windows} is too small, set 1 or more, or none for all")
    if not 0 <= train.warmup <= train.steps:
        raise UserError(f"config.train.warmup: {train.warmup} is not between 0 and the {train.steps} steps")
    for name in ("learning_rate", "weight_decay", "z_loss", "label_smoothing"):
        if getattr(train, name) < 0:
            raise UserError(f"config.train.{name}: {getattr(train, name)} is below 0")
    if train.label_smoothing >= 1:
        raise UserError(f"config.train.label_smoothing: {train.label_smoothing} is not below 1")
    if train.clip is not None and train.clip <= 0:
        raise UserError(f"config.train.clip: {train.clip} is not above 0; none turns clipping off")
    schedule = train.schedule
    if not isinstance(schedule, Constant) and not 0 <= schedule.final <= 1:
        raise UserError(f"config.train.schedule.final: {schedule.final} is not a share between 0 and 1")
    if isinstance(schedule, WarmupStableDecay) and not 0 < schedule.decay <= 1:
        raise UserError(f"config.train.schedule.decay: {schedule.decay} is not a share above 0 and up to 1")
    optimizer = train.optimizer
    betas = ("b1", "b2", "momentum") if isinstance(optimizer, Muon) else ("b1", "b2")
    for name in betas:
        if not 0 <= getattr(optimizer, name) < 1:
            raise UserError(f"config.train.optimizer.{name}: {getattr(optimizer, name)} is not from 0 up to below 1")
    if isinstance(optimizer, Muon) and optimizer.rms <= 0:
        raise UserError(f"config.train.optimizer.rms: {optimizer.rms} is not above 0")
    if optimizer.epsilon <= 0:
        raise UserError(f"config.train.optimizer.epsilon: {optimizer.epsilon} is not above 0")
    if train.profile and not (len(train.profile) == 2 and 1 <= train.profile[0] <= train.profile[1] <= train.steps):
        text = ",".join(map(str, train.profile))
        raise UserError(
            f"config.train.profile: {text} is not a first and a last step within the {train.steps}, such as 10,12"
        )
