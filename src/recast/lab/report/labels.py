"""Labels of the arms of a run, of suites and of metrics (from `recast.lab.evaluation.suites`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recast.lab.evaluation.suites import METRICS, SUITES, base, of_kind
from recast.lab.folder.records import ARMS, Row
from recast.lab.folder.run import RunFolder
from recast.lab.pages.formats import NBSP
from recast.lab.report.load import Run


@dataclass(frozen=True)
class Words:
    """Names of the arms, which depend on whether a trained parent or a network in training is recast."""

    arms: dict[str, str]  # in legends and heads of columns
    control: str  # the arm `finetuned` in a sentence
    parent: str  # the arm `parent` in a sentence
    comparison: str  # description of the arms above the table
    others: tuple[str, ...] = ("parent", "finetuned")  # baselines of the recast arm

    @property
    def drawn(self) -> list[str]:
        """The arms shown in charts; the parent only if it is a baseline."""
        return [arm for arm in self.arms if arm != "parent" or arm in self.others]


ALL_ARMS = "The original network, the same network fine-tuned, and the recast network fine-tuned in the same way."
PARENT = Words(
    arms=ARMS,
    control="the parent fine-tuned the same way",
    parent="the parent before fine-tuning",
    comparison=f"{ALL_ARMS} Only the comparison with the fine-tuned parent shows what attention adds: fine-tuning "
    "alone has an effect too.",
)
FROM_START = Words(
    arms={"parent": "Before training", "finetuned": "Convolution only", "recast": "Recast"},
    control="the same network trained the same way as a convolution",
    parent="the network before training",
    comparison="The network before training, the same network trained as a convolution throughout, and the network "
    "recast during training. The difference between the last two is the effect of attention.",
    others=("finetuned",),
)
PLAIN = replace(PARENT, arms={"finetuned": "Network"}, comparison="This run recast nothing.", others=())


def words(*runs: Run) -> Words:
    """Return the words for one or several runs: those for a trained parent if any run has one."""
    recast = [run for run in runs if not run.is_plain]
    if not recast:
        return PLAIN
    if all(run.is_scheduled and RunFolder(run.path).has_new_parent(run.recipe.model) for run in recast):
        return FROM_START
    reason = next((run.why_no_baseline for run in recast if run.why_no_baseline), "")
    comparison = f"{ALL_ARMS} The original is no baseline here: {reason}."
    return replace(PARENT, others=("finetuned",), comparison=comparison) if reason else PARENT


TEST_SETS = of_kind("test set")
CORRUPTIONS = tuple(reversed(of_kind("corruption")))  # the first one measured is shown first


def suite_title(suite: str, short: bool = False) -> str:
    """Return the label of a suite, or its short title; an unknown suite is its own label."""
    entry = SUITES.get(suite)
    return suite if entry is None else entry.title if short else entry.label


def metric_label(metric: str) -> str:
    """Return the label of a metric with its unit: `Top-1, %`."""
    entry = METRICS.get(metric)
    return metric if entry is None else f"{entry.label},{NBSP}%" if entry.unit == "%" else entry.label


def measured(suite: str, metric: str) -> str:
    """Return the label of a row: `Top-1, %, ε = 1/255`."""
    name, _, setting = metric.partition("@")
    first, _, detail = name.partition("/")
    if suite in TEST_SETS:
        return suite_title(suite) if metric == "top1" else f"{suite_title(suite)}, {metric_label(first)}"
    if setting and suite in SUITES:
        setting = SUITES[suite].setting.format(setting)
    parts = [metric_label(first), "mean of all" if detail == "mean" else detail, setting.replace(" ", NBSP)]
    return ", ".join(part for part in parts if part)


def glossary(runs: Sequence[Run]) -> dict[str, str]:
    """Return the meaning of every metric and suite that was measured."""
    rows = [row for run in runs for row in worth_a_line(run.rows)]
    suites = dict.fromkeys(row.suite for row in rows if row.suite in SUITES)
    metrics = dict.fromkeys(name for row in rows if (name := base(row.metric)) in METRICS)
    meanings = {METRICS[name].label: METRICS[name].meaning for name in metrics}
    return meanings | {suite_title(name): SUITES[name].help for name in suites}


def worth_a_line(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without the share of images that gave an attack no gradient, if it is 0."""
    masked = any(row.metric == "no_gradient" and row.value > 0 for row in rows)
    return [row for row in rows if masked or row.metric != "no_gradient"]


def is_accuracy(metric: str) -> bool:
    return (entry := METRICS.get(base(metric))) is not None and entry.is_accuracy
