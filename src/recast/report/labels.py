"""What things are called: the arms of a run, suites and metrics (`recast.run.suites` has their names)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recast.report.charts import Key
from recast.report.formats import NBSP
from recast.report.load import ARMS, Run
from recast.run.suites import METRICS, SUITES, base, of_kind


@dataclass(frozen=True)
class Words:
    """A trained parent that is recast and a network that is recast while it learns are told of in other words."""

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

    @property
    def others(self) -> tuple[str, ...]:
        """The arms that the recast one is compared with."""
        return ("parent", "finetuned") if "recast" in self.arms else ()


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


def words(*runs: Run) -> Words:
    """The words for a run, or for a table over several: those of a trained parent unless no run has one."""
    recast = [run for run in runs if not run.is_plain]
    if not recast:
        return PLAIN
    return FROM_START if all(map(learns_from_start, recast)) else PARENT


def learns_from_start(run: Run) -> bool:
    """The run is recast during the training that it starts with: its parent holds nobody's weights but its own."""
    model, own = run.recipe.model, (run.path / "parent.safetensors").resolve()
    is_own = model.checkpoint is None or (run.path / model.checkpoint).resolve() == own
    return run.is_scheduled and is_own and not model.pretrained


def arm_keys(run: Run, arms: Sequence[object] = ARMS) -> list[Key]:
    """The legend of a chart of arms."""
    return [Key(name, arm) for arm, name in words(run).arms.items() if arm in arms]


CORRUPTIONS = tuple(reversed(of_kind("corruption")))
"""What is shown first where several were measured comes first."""


def suite_title(suite: str, short: bool = False) -> str:
    """The name of a suite; of one that is not known, its own."""
    known = SUITES.get(suite)
    return suite if known is None else known.title if short else known.label


def metric_label(metric: str) -> str:
    """`Top-1, %`."""
    known = METRICS.get(metric)
    return metric if known is None else f"{known.label},{NBSP}%" if known.unit == "%" else known.label


def is_accuracy(metric: str) -> bool:
    return (known := METRICS.get(base(metric))) is not None and known.is_accuracy
