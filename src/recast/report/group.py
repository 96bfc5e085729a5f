"""Runs of the same data side by side: runs of different data share neither a figure nor a mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recast.report.figures.chart import Chart
from recast.report.figures.cost import CostAxis, cost_axes
from recast.report.figures.fourier import joint_fourier
from recast.report.read.run import Run
from recast.report.tables.seeds import why_no_mean
from recast.report.tables.summary import SeedLine, over_seeds, summary
from recast.report.text.words import Words, joint_words


@dataclass(frozen=True)
class Group:
    """What can be said of runs together."""

    anchor: str
    data: str
    runs: list[Run]
    anchors: list[str]
    """Of the runs' own sections."""
    lines: list[dict[str, str]]
    mean: dict[str, str] | None
    why_no_mean: str
    seeds: list[SeedLine]
    costs: list[CostAxis]
    fourier: Chart | None

    @property
    def words(self) -> Words:
        return joint_words(self.runs)

    def figures(self) -> list[Chart]:
        """The figures for paper."""
        return [*(axis.figure() for axis in self.costs), *([self.fourier] if self.fourier else [])]


def read_groups(runs: Sequence[Run]) -> list[Group]:
    """One group per data set, in the order in which the runs were given."""
    keys = list(dict.fromkeys(run.data_key for run in runs))
    return [_group(runs, key, f"data{place + 1}") for place, key in enumerate(keys)]


def _group(runs: Sequence[Run], key: tuple[str, ...], anchor: str) -> Group:
    places = [place for place, run in enumerate(runs) if run.data_key == key]
    own = [runs[place] for place in places]
    lines, mean = summary(own)
    return Group(
        anchor=anchor,
        data=" ".join(part for part in key[:2] if part),
        runs=own,
        anchors=[f"run{place + 1}" for place in places],
        lines=lines,
        mean=mean,
        why_no_mean=why_no_mean(own) if len(own) > 1 else "",
        seeds=over_seeds(own),
        costs=cost_axes(own) if len(own) > 1 else [],
        fourier=joint_fourier(own),
    )
