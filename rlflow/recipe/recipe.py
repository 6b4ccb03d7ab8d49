"""The recipe of one run as dataclasses, which the rest of the pipeline sees.

The docstring below a field is its meaning in docs/reference.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from rlflow.recipe.evaluation import Evaluation
from rlflow.resources.layout import Resources
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import Lora
from rlflow.resources.models.vision import TrainedParts
from rlflow.resources.workload import Overlap
from rlflow.schema import MAY_CHANGE, OPERATIONAL, Count, CountOrZero, Section, Steps, Text

NUM_BYTE_TOKENS = 265
"""The tokens of ``tokenizer: bytes``: each byte, and those of a chat template, thoughts and tools."""


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """Weights and tokenizer, from exactly one of ``path``, ``recipe`` and ``random_weights``."""

    path: str | None = None
    """A folder, or a name on the Hugging Face hub."""
    recipe: "Recipe | None" = None
    """A recipe, by its name, that trains this model. It runs first unless its result is in the cache."""
    random_weights: bool = False
    """Initialize random weights of ``architecture``, with ``characters`` or a new ``tokenizer``."""
    characters: Text | None = None
    """The tokens of a model with random weights: each character is one, and others are refused."""
    tokenizer: Literal["bytes"] | None = None
    """The tokenizer of a model with random weights: each byte of any text is a token. It has a chat template."""
    chat_template: Text | None = None
    """A chat template (Jinja) in place of the tokenizer's own, which base models often lack. It is exported, too."""
    architecture: Architecture | None = None
    """The sizes that planning needs. They come from conf/model or from the ``config.json`` at ``path``."""
    architecture_of: str | None = field(default=None, metadata=OPERATIONAL)
    """The model on the hub that ``architecture`` describes. The model at ``path`` must have the same sizes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The number type of the weights."""
    trust_remote_code: bool = field(default=False, metadata=OPERATIONAL)
    """Run the Python files at ``path`` that its ``auto_map`` names, with the rights of the user."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """AdamW, or Muon, with a learning rate that depends only on the step."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon``: the matrices of the layers take Muon's updates, scaled to the size of AdamW's; all other weights take
    AdamW's."""
    learning_rate: Annotated[float, Ge(1e-12), Le(1)] = field(default=1e-6, metadata=MAY_CHANGE)
    """The learning rate after the warm-up, which is the highest."""
    schedule: Literal["constant", "linear", "cosine"] = field(default="constant", metadata=MAY_CHANGE)
    """The learning rate after the warm-up: constant, or falling to zero at the last step."""
    warmup_steps: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    """The first steps, in which the learning rate rises linearly."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.999)
    """The decay of AdamW's running means of gradients and of their squares."""
    weight_decay: Annotated[float, Ge(0), Le(10)] = 0.0
    """The decoupled weight decay."""
    max_grad_norm: Annotated[float, Ge(1e-6), Le(1e12)] = 1.0
    """The norm to which larger gradients are scaled down."""

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate at ``step`` of ``steps``, counted from 0; negative steps have 0."""
        if step < 0:
            return 0.0
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        factor = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * factor


@dataclass(frozen=True, kw_only=True)
class Role(Resources):
    """A model doing one job."""

    model: str
    """A name under ``models``."""
    engine: str
    """The library that runs the model: ``deepspeed``, ``fsdp``, ``torch``, ``transformers`` or ``vllm``."""
    follows: str | None = None
    """The trained role whose weights this role receives after every step."""
    optimizer: Optimizer | None = None
    """The optimizer of a trained role."""
    lora: Lora | None = None
    """Adapters of a trained role, which are trained instead of its weights. They are in the language part alone."""
    train: TrainedParts = "language"
    """The parts of a vision-language model that are trained: ``language``, ``all``, or a list of ``language``,
    ``tower`` and ``projector``."""
    routing_replay: bool = True
    """Train a mixture of experts with the experts that its sampler used for each token, which differ for some tokens
    from those that the trained model would choose (R3). Models without experts ignore it."""


@dataclass(frozen=True, kw_only=True)
class ImageLimits(Section):
    """The limits of images in prompts. A row beyond them ends the run before its images are decoded."""

    max_pixels: Count = 2**26
    """The pixels of an image, as its header has them. A model's own image processor scales large images down."""
    max_per_prompt: Count = 8
    """The images of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """The data set that prompts come from."""

    hints_for_other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("chat_template_kwargs", "apply_chat_template_kwargs"), "template_options"
    )

    source: Text
    """A JSON, JSONL, CSV or Parquet file, a folder of them, a data set on the hub, or ``package.module:function``.
    ``reasoning_gym:TASK``, ``textarena:GAME`` and ``verifiers:TASKSET`` generate rows."""
    name: str | None = None
    """The configuration of a data set on the hub."""
    split: Text = "train"
    """The split that is trained on."""
    eval_split: Text | None = None
    """The split with the held-out rows of ``evaluation``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The data set's column for each name used here: ``prompt``, ``response``, ``images``, for pairs ``chosen`` and
    ``rejected``, and the names that the reward reads. A dot reaches into a column: ``reward_model.ground_truth``."""
    system_prompt: str | None = None
    """The system message of every prompt that has none of its own. The tokenizer needs a chat template."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template, such as ``enable_thinking: false``."""
    batch_size: Count = field(metadata=MAY_CHANGE)
    """Prompts, examples or pairs in each step."""
    max_prompt_tokens: Count
    """The limit of a prompt; ``overlong`` decides about longer ones."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """Handling of prompts with more tokens: end the run, drop their rows, or keep only their last tokens."""
    train_on: Literal["last", "all"] = "last"
    """The turns of the assistant in a conversation that supervised training learns: its last, or all of them. Tokens
    that the chat template writes between turns are read, and not learned."""
    image: ImageLimits = ImageLimits()
    """Limits of images."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Section):
    """The checkpoints of a run."""

    every: Steps
    """Steps between two checkpoints. The last is at the end of the run."""
    keep: Count = 2
    """The number of newest checkpoints that are not deleted."""


Expected = Annotated[float, Gt(0), Le(2**31 - 1)] | tuple[Annotated[float, Le(2**31 - 1)], ...] | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Expect(Section):
    """Expected lengths for planning: a mean, or a list of equally likely lengths. They do not change the run.

    Lengths beyond the limit end there.
    """

    prompt_tokens: Expected = "auto"
    """The tokens of a prompt."""
    image_tokens: Annotated[float, Ge(0), Le(2**31 - 1)] = 0.0
    """The part of a prompt's tokens that stands for its images."""
    response_tokens: Expected = "auto"
    """The tokens of a response that are generated. In a file, also the folder of an earlier run, whose lengths are
    used."""
    turns: Annotated[float, Ge(1)] | Literal["auto"] = "auto"
    """The model's turns of a conversation, or its calls in an episode; by default the limit of the node."""
    wait_s: Annotated[float, Ge(0), Le(7 * 24 * 3600)] = 0.0
    """The seconds that an environment or an agent takes for each turn."""
    observation_tokens: Annotated[float, Ge(0), Le(2**31 - 1)] = 0.0
    """The tokens that an environment or an agent adds to a response between two turns."""
    segments: Annotated[float, Ge(1)] = 1.0
    """The sequences of a response. Each begins with a prompt of ``prompt_tokens``."""
    rounds: Annotated[float, Ge(1), Le(1e6)] = 1.0
    """Prompts that ``dynamic_sampling`` generates for, per prompt that is trained on."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """Everything that defines one run."""

    name: str
    """The name of the run, for people and for the cache of models that recipes train."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """The seed of all random numbers."""
    steps: Steps = field(metadata=MAY_CHANGE)
    """Passes over the graph."""
    models: Mapping[str, Model]
    roles: Mapping[str, Role]
    graph: Mapping[str, Mapping[str, Any]]
    """The kind, role, options and inputs of each node. The stage ``wire`` reads them."""
    data: Data
    evaluation: Evaluation | None = field(default=None, metadata=MAY_CHANGE)
    checkpoints: Checkpoints = field(metadata=OPERATIONAL)
    expect: Expect = field(default=Expect(), metadata=OPERATIONAL)
    overlap: Overlap = field(default_factory=Overlap)
    max_restarts: CountOrZero = field(default=2, metadata=OPERATIONAL)
    """How often in a row the run goes back to the same checkpoint when it has lost workers."""
    elastic: bool = field(default=False, metadata=OPERATIONAL)
    """Plan again for the other hosts when the run has lost some, and continue on them."""
    stop_after_skipped_steps: Count = field(default=3, metadata=OPERATIONAL)
    """The number of steps in a row after which the run stops that were skipped for values that are not finite."""
    trackers: tuple[Text, ...] = field(default=("tensorboard",), metadata=OPERATIONAL)
    """The trackers that receive metrics and samples: ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``, ``swanlab``,
    or ``package.module:Class`` for one of your own."""
    push_to_hub: Text | None = field(default=None, metadata=OPERATIONAL)
    """The repository on the Hugging Face hub, ``USER/NAME``, to which the trained model is uploaded at the end of the
    run. A new repository is private."""

    def lora_of(self, role: str) -> Lora | None:
        """Return the adapters that a role computes with: its own, or those that the role sends which it follows."""
        leader = self.roles[role].follows
        lora = self.roles[leader or role].lora
        return None if leader and lora is not None and lora.merge else lora
