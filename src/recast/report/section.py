"""Everything the page says of one run, ready for the template."""

from __future__ import annotations

from dataclasses import dataclass

from recast.report.facts import notes, tiles
from recast.report.figures import arms, maps
from recast.report.figures.chart import Chart, joined
from recast.report.figures.cost import CostAxis, cost_axes
from recast.report.figures.distance import distance_charts
from recast.report.figures.fourier import fourier_charts, fourier_note
from recast.report.figures.heads import HeadLayer, head_charts
from recast.report.figures.map_chart import map_charts
from recast.report.figures.relative import relative_charts
from recast.report.figures.similarity import similarity_charts
from recast.report.figures.sweeps import sweeps
from recast.report.figures.switches import Section as SwitchSection
from recast.report.figures.switches import switch_section
from recast.report.read.run import Run
from recast.report.tables.agreement import Pair, agreement
from recast.report.tables.arms import Group, swept, three_arms
from recast.report.tables.heads import LayerLine, head_lines
from recast.report.tables.heat import HeatTable, heat_tables
from recast.report.tables.made import MadeLine, made_lines, missing
from recast.report.text import verdict
from recast.report.text.words import Words, words

MAP_BYTES = 1_600_000
"""Attention maps of one page; images beyond that are left out and counted."""
HEAD_BYTES = 1_200_000
"""Charts of gates and spans of one page."""


@dataclass(frozen=True)
class Section:
    """Charts and tables of one run; empty lists for what was not measured."""

    anchor: str
    run: Run
    verdict: str
    tiles: list[dict[str, str]]
    groups: list[Group]
    swept: list[Group]
    notes: list[str]
    has_control: bool
    costs: list[CostAxis]
    adversarial: list[Chart]
    relative: list[Chart]
    heat: list[HeatTable]
    corruptions: list[Chart]
    sweeps: list[Chart]
    training: list[Chart]
    switches: SwitchSection | None
    head_layers: list[HeadLayer]
    hidden_layers: int
    head_lines: list[LayerLine]
    distances: list[Chart]
    symbol: str
    panels: list[maps.ImageMaps]
    left_out: int
    fourier: list[Chart]
    fourier_note: str
    similarity: list[Chart]
    agreement: list[Pair]
    made: list[MadeLine]
    missing: list[str]
    missing_command: str

    @property
    def words(self) -> Words:
        return words(self.run)

    def figures(self) -> list[Chart]:
        """Every figure of the run for paper: small charts of one kind are the panels of one."""
        of_switches = [self.switches.chart, self.switches.probes] if self.switches else []
        of_heads = [panel.chart for layer in self.head_layers for panel in layer.panels]
        return [
            *(axis.figure() for axis in self.costs),
            *self.adversarial,
            *self.relative,
            *([joined("severity", "Top-1, %, by severity", self.corruptions)] if self.corruptions else []),
            *self.sweeps,
            *self.training,
            *(chart for chart in of_switches if chart),
            *(chart for chart in of_heads if chart),
            *self.distances,
            *self.fourier,
            *self.similarity,
            *(map_charts(self.run.attention, self.symbol) if self.run.attention else []),
        ]


def read_section(run: Run, anchor: str, count: int) -> Section:
    """One of `count` runs of a page."""
    symbol = {"linear": "γ", "sigmoid": "1−σ(λ)"}.get(run.gate, "")
    panels = maps.image_maps(run.attention, symbol, MAP_BYTES // count) if run.attention else []
    layers, hidden = head_charts(run, HEAD_BYTES // count)
    absent, command = missing(run)
    return Section(
        anchor=anchor,
        run=run,
        verdict=verdict.verdict(run),
        tiles=tiles(run),
        groups=three_arms(run),
        swept=swept(run),
        notes=notes(run),
        has_control=run.is_plain or bool(run.control) or any(row.model == "finetuned" for row in run.rows),
        costs=cost_axes([run]) if count == 1 else [],
        adversarial=arms.adversarial(run),
        relative=relative_charts(run),
        heat=heat_tables(run),
        corruptions=arms.corruptions(run),
        sweeps=sweeps(run),
        training=arms.training(run),
        switches=switch_section(run),
        head_layers=layers,
        hidden_layers=hidden,
        head_lines=head_lines(run),
        distances=distance_charts(run),
        symbol=symbol,
        panels=panels,
        left_out=len(run.attention.images) - len(panels) if run.attention else 0,
        fourier=fourier_charts(run),
        fourier_note=fourier_note(run),
        similarity=similarity_charts(run),
        agreement=agreement(run),
        made=made_lines(run),
        missing=absent,
        missing_command=command,
    )
