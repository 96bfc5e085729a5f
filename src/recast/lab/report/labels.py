"""What things are called: the arms of a run, suites and metrics (`recast.lab.suites` has their names)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from recast.lab.recipe import has_new_parent
from recast.lab.records import ARMS, Row
from recast.lab.report.charts import Key
from recast.lab.report.formats import NBSP
from recast.lab.report.load import Run
from recast.lab.suites import METRICS, PER_CORRUPTION, SUITES, base, of_kind


@dataclass(frozen=True)
class Words:
    """A trained parent that is recast and a network that is recast while it learns have different names."""

    arms: dict[str, str]
    """Of legends and the heads of columns."""
    control: str
    """The arm `finetuned` in a sentence."""
    parent: str
    """The arm `parent` in a sentence."""
    comparison: str
    """The three arms, for the reader of the table."""
    others: tuple[str, ...] = ("parent", "finetuned")
    """The arms that the recast one is compared with."""

    @property
    def drawn(self) -> list[str]:
        """The arms of charts: a parent that is nothing to compare with is left out."""
        return [arm for arm in self.arms if arm != "parent" or arm in self.others]


PARENT = Words(
    arms=ARMS,
    control="the parent fine-tuned the same way",
    parent="the parent as it was",
    comparison="The network as it was, the same network trained on in the same way, and the recast one. Only the "
    "comparison with the fine-tuned one shows what attention adds: training on alone changes a network too.",
)
UNTAUGHT = (
    "The network as it was, the same network trained on in the same way, and the recast one. The parent as it was is "
    "nothing to compare with here: {}. The difference to the fine-tuned one shows what attention adds."
)
FROM_START = Words(
    arms={"parent": "Before training", "finetuned": "Convolution only", "recast": "Recast"},
    control="the same network trained the same way as a convolution",
    parent="the network before training",
    comparison="The network before training, the same one trained the same way as a convolution from the first epoch "
    "to the last, and the one recast on the way: the difference between the last two is what attention adds.",
    others=("finetuned",),
)
PLAIN = replace(
    PARENT,
    arms={"finetuned": "Network"},
    comparison="This run recast nothing: there is one arm, the network as it was trained.",
    others=(),
)


def words(*runs: Run) -> Words:
    """The words for a run, or for a table over several: those of a trained parent unless no run has one."""
    recast = [run for run in runs if not run.is_plain]
    if not recast:
        return PLAIN
    if all(map(learns_from_start, recast)):
        return FROM_START
    why = next((run.untaught for run in recast if run.untaught), "")
    return replace(PARENT, others=("finetuned",), comparison=UNTAUGHT.format(why)) if why else PARENT


def learns_from_start(run: Run) -> bool:
    """The run is recast during the training that it starts with: its parent holds nobody's weights but its own."""
    return run.is_scheduled and has_new_parent(run.recipe, run.path)


def arm_keys(run: Run, arms: Collection[object] = ARMS) -> list[Key]:
    """The legend of a chart of arms."""
    return [Key(name, arm) for arm, name in words(run).arms.items() if arm in arms]


TEST_SETS = of_kind("test set")
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


def measured(suite: str, metric: str, shared: str = "") -> str:
    """What a number of a suite is of: `Top-1, %, ε = 1/255`; where a heading has the metric's name, it is `shared`."""
    name, _, setting = metric.partition("@")
    first, _, detail = name.partition("/")
    if suite in TEST_SETS:
        return suite_title(suite) if metric == "top1" else f"{suite_title(suite)}, {metric_label(first)}"
    if suite == "resolution" and setting:
        height, _, width = setting.partition("x")
        setting = f"{height} × {width or height}"
    elif setting and suite in SUITES:
        setting = SUITES[suite].setting.format(setting)
    if suite == "frequency":
        return f"{'below' if first == 'low' else 'above'} {setting}"
    if found := PER_CORRUPTION.match(metric):
        detail = f"{found['kind'].replace('_', ' ')} at severity {found['severity']}"
    label = "" if first == shared else metric_label(first)
    parts = [label, "mean of all" if detail == "mean" else detail, setting.replace(" ", NBSP)]
    return ", ".join(part for part in parts if part)


def in_suite(suite: str, metric: str) -> str:
    """The same with the name of the suite."""
    found = measured(suite, metric)
    return found if suite in TEST_SETS else f"{suite_title(suite)}: {found}"


def glossary(runs: Sequence[Run]) -> dict[str, str]:
    """The meaning of every metric and suite that was measured."""
    rows = [row for run in runs for row in worth_a_line(run.rows)]
    suites = dict.fromkeys(row.suite for row in rows if row.suite in SUITES)
    metrics = dict.fromkeys(name for row in rows if (name := base(row.metric)) in METRICS)
    meanings = {METRICS[name].label: METRICS[name].meaning for name in metrics}
    return meanings | {suite_title(name): SUITES[name].help for name in suites}


def worth_a_line(rows: Sequence[Row]) -> list[Row]:
    """Without the share of images that gave an attack no gradient, where it is none."""
    masked = any(row.metric == "no_gradient" and row.value > 0 for row in rows)
    return [row for row in rows if masked or row.metric != "no_gradient"]


def is_accuracy(metric: str) -> bool:
    return (known := METRICS.get(base(metric))) is not None and known.is_accuracy
