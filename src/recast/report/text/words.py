"""What the arms of a run are called: a trained parent that is recast, or a network that is recast while it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recast.report.read.run import Run
from recast.run.files import mapping


@dataclass(frozen=True)
class Words:
    arms: dict[str, str]
    """Of legends and the heads of columns."""
    control: str
    """The arm `finetuned` in a sentence."""
    a_control: str
    """The same, of one among several runs."""
    control_short: str
    parent_short: str
    reference: str
    """The parent, as the dashed line of a chart."""
    comparison: str
    """What the three arms are, for the reader of the table."""
    no_control: str


PARENT = Words(
    arms={"parent": "Parent", "finetuned": "Parent, fine-tuned", "recast": "Recast"},
    control="the parent fine-tuned the same way",
    a_control="a parent fine-tuned the same way",
    control_short="the parent fine-tuned",
    parent_short="the parent",
    reference="the parent as it was",
    comparison="The network as it was, the same network trained on in the same way, and the recast one. Only the "
    "second comparison shows what attention adds: training on alone changes a network too.",
    no_control="There is no fine-tuned parent in this run. Train with the control arm on before drawing conclusions.",
)
FROM_START = Words(
    arms={"parent": "Before training", "finetuned": "Convolution only", "recast": "Recast"},
    control="the same network trained the same way as a convolution",
    a_control="the same network trained the same way as a convolution",
    control_short="the same network as a convolution",
    parent_short="the network before training",
    reference="the network before training",
    comparison="The network before training, the same one trained the same way as a convolution from the first epoch "
    "to the last, and the one recast on the way. Only the second comparison shows what attention adds.",
    no_control="The network was not trained as a convolution beside this run. Train with the control arm on before "
    "drawing conclusions.",
)


PLAIN = replace(
    PARENT,
    arms={"finetuned": "Network"},
    comparison="This run recast nothing: there is one arm, the network as it was trained.",
    no_control="",
)


def words(run: Run) -> Words:
    """The words for one run."""
    if run.is_plain:
        return PLAIN
    return FROM_START if learns_from_start(run) else PARENT


def joint_words(runs: Sequence[Run]) -> Words:
    """The words for a table over several runs: those of a trained parent unless no run has one."""
    recast = [run for run in runs if not run.is_plain]
    if not recast:
        return PLAIN
    return FROM_START if all(learns_from_start(run) for run in recast) else PARENT


def learns_from_start(run: Run) -> bool:
    """The run is recast during the training that it starts with: its parent holds nobody's weights but its own."""
    model = mapping(run.recipe.get("model"))
    checkpoint = model.get("checkpoint")
    own = checkpoint is None or (run.path / str(checkpoint)).resolve() == (run.path / "parent.safetensors").resolve()
    return run.is_scheduled and own and not model.get("pretrained")
