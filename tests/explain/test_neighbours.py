from pathlib import Path

import pytest
import torch
from torch import nn

from recast.lab.cli import main
from recast.lab.config import DataConfig, Recipe
from recast.lab.data import load_data
from recast.lab.explain.inputs import read_inputs
from recast.lab.explain.neighbours import Query, Shown, find_neighbours
from recast.lab.pages.template import fill_page
from recast.lab.training.run import train
from recast.models.config import ModelConfig

PNG = "data:image/png;base64,AAAA"


def test_marks() -> None:
    beaver, otter = Shown(PNG, "a", "beaver", "mammals"), Shown(PNG, "b", "otter", "mammals", 0.5)
    shark = Shown(PNG, "c", "<shark>", "fish", 0.25)
    assert [image.beside(beaver) for image in (beaver, otter, shark)] == ["right", "group right", "wrong"]
    assert otter.beside(Shown(PNG, "x", "")) == ""
    assert Shown(PNG, "b", "otter").beside(Shown(PNG, "a", "beaver")) == "wrong"  # no coarse class is no common one
    queries = [Query(beaver, {"Recast": [beaver, otter, shark]})]
    page = fill_page("neighbours.html.j2", "explain.css", title="", notes=[], queries=queries)
    assert "Recast, 1 of 3 right" in page
    assert "same group of classes only" in page
    queries = [Query(Shown(PNG, "a", "beaver"), {})]
    assert "same group of classes only" not in fill_page(
        "neighbours.html.j2", "explain.css", title="", notes=[], queries=queries
    )
    assert all(mark in page for mark in ("✓ beaver", "~ otter", "✗ &lt;shark&gt;", "0.25"))


def test_the_nearest_are_those_of_the_pixels() -> None:
    data = load_data(DataConfig("digits", img_size=8, num_train=40, num_val=10))
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))  # its features are the normalised pixels
    inputs, _ = read_inputs([3], (8, 8), 1, data=data)
    (neighbours,) = find_neighbours({"Network": network}, data, inputs)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (data.mean, data.std))
    both = data.train.plain().batch(range(40))[0], inputs[0].pixels[None]
    bank, query = (((pixels - mean) / std).flatten(1) for pixels in both)
    similarities = torch.cosine_similarity(query, bank)
    order = similarities.argsort(descending=True)[:10]
    nearest = neighbours.nearest["Network"]
    assert [image.label for image in nearest] == [data.classes[int(data.train.labels[i])] for i in order]
    assert [image.similarity for image in nearest] == pytest.approx(similarities[order].tolist(), abs=1e-3)


def test_a_run_trained_with_coarse_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{digit},{'odd' if digit % 2 else 'even'}" for digit in range(10)]
    (tmp_path / "parity.csv").write_text("\n".join(["fine,coarse", *lines]), encoding="utf-8")
    data = DataConfig("digits", img_size=8, num_train=40, num_val=20, batch_size=20)
    papers = {"grafit": {"labels": "coarse", "coarse_file": tmp_path / "parity.csv"}}
    recipe = Recipe(ModelConfig("digits_resnet"), data, where=["none"], epochs=1, device="cpu", papers=papers)
    run = train(recipe, tmp_path / "run")
    for out in ([], ["--out", str(tmp_path / "n.html")]):
        words = ["explain", str(run), "--neighbours", "val:1", *out]
        assert [main(words), main(words)] == [0, 0]  # its own page is replaced, anybody else's is not
        target = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("page: "))
        target.write_text("<p>mine</p>", encoding="utf-8")
        assert main(words) == 2
        assert target.read_text(encoding="utf-8") == "<p>mine</p>"
        capsys.readouterr()
    assert main(["explain", str(run), "--neighbours", "val:1", "val:2"]) == 0
    page = Path(capsys.readouterr().out.removeprefix("page: ").strip()).read_text(encoding="utf-8")
    assert page.count("<figure") == 2 * 11
    assert any(coarse in page for coarse in ("odd<br>", "even<br>"))
    for wrong, message in (
        (["digits_resnet", "--neighbours"], "requires a run folder, got digits_resnet"),
        ([str(run), "--neighbours", "--out", "x.png"], "use the ending .html"),
        ([str(run), "--neighbours", "val:20"], "val:20 is out of range"),
    ):
        assert main(["explain", *wrong]) == 2
        assert message in capsys.readouterr().err
