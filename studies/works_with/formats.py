"""COCO's JSON as annotation packages write it: does `--data coco` read the same boxes? No network takes part."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tools import Case, Cell, tool

import recast.papers  # noqa: F401
from recast.lab.config import DataConfig
from recast.lab.data import load_data

CLASSES = ("cat", "dog")
BOXES = {
    "a.png": [(4.0, 8.0, 20.0, 24.0, "cat"), (30.0, 2.0, 60.0, 12.0, "dog")],
    "b.png": [(10.5, 10.25, 33.75, 40.0, "dog")],
    "c.png": [(0.0, 0.0, 64.0, 64.0, "cat")],
}
"""File → left, top, right, bottom and class of its objects; images of 64×64."""


def annotations(name: str, does: str, *packages: str, remedy: dict[str, str] | None = None) -> Callable[[Any], object]:
    """Add a function that writes annotations.json in a folder with images/."""

    def add(export: Callable[[Path], None]) -> object:
        def run(case: Case) -> Cell:
            folder = Path(case.layer)
            (folder / "images").mkdir(parents=True)
            for i, file in enumerate(BOXES):
                Image.fromarray(np.full((64, 64, 3), 80 * i, np.uint8)).save(folder / "images" / file)
            export(folder)
            data: Any = load_data(DataConfig("coco", data_dir=str(folder), img_size=64, val_fraction=0.4))
            errors = []
            for part in (data.train.plain(), data.val):
                for i in range(len(part)):
                    target = part[i][1]
                    names = [data.classes[int(label) - 1] for label in target["labels"]]
                    rows = sorted(zip(target["boxes"].tolist(), names, strict=True))
                    true = sorted(([*box[:4]], box[4]) for box in BOXES[Path(part.image_name(i)).name])
                    if [name for _, name in rows] != [name for _, name in true]:
                        return Cell("wrong", None, f"classes {names}")
                    pairs = zip(rows, true, strict=True)
                    errors += [abs(a - b) for (box, _), (own, _) in pairs for a, b in zip(box, own, strict=True)]
            return Cell(
                "exact" if max(errors) < 1e-2 else "works" if max(errors) < 1 else "wrong", max(errors), "pixels"
            )

        return tool(name, does, *packages, remedy=remedy, is_own=True)(run)

    return add


def arrays(file: str) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes and class numbers of an image."""
    return np.array([box[:4] for box in BOXES[file]]), np.array([CLASSES.index(box[4]) for box in BOXES[file]])


@annotations("supervision", "`DetectionDataset.as_coco`, then `--data coco`", "supervision==0.31.2")
def by_supervision(folder: Path) -> None:
    import supervision

    paths = {file: str(folder / "images" / file) for file in BOXES}
    objects = {paths[file]: supervision.Detections(*arrays(file)[:1], class_id=arrays(file)[1]) for file in BOXES}
    supervision.DetectionDataset(list(CLASSES), list(paths.values()), objects).as_coco(
        annotations_path=str(folder / "annotations.json")
    )


@annotations("sahi", "`Coco.json`, then `--data coco`", "sahi==0.12.8")
def by_sahi(folder: Path) -> None:
    from sahi.utils.coco import Coco, CocoAnnotation, CocoCategory, CocoImage

    coco = Coco()
    for i, name in enumerate(CLASSES):
        coco.add_category(CocoCategory(id=i, name=name))
    for file, boxes in BOXES.items():
        image = CocoImage(file_name=file, height=64, width=64)
        for left, top, right, bottom, name in boxes:
            image.add_annotation(
                CocoAnnotation(
                    bbox=[left, top, right - left, bottom - top], category_id=CLASSES.index(name), category_name=name
                )
            )
        coco.add_image(image)
    (folder / "annotations.json").write_text(json.dumps(coco.json))


@annotations("globox", "`AnnotationSet.save_coco`, then `--data coco`", "globox==2.9.0")
def by_globox(folder: Path) -> None:
    import globox

    images = [
        globox.Annotation(
            file, (64, 64), [globox.BoundingBox(label=b[4], xmin=b[0], ymin=b[1], xmax=b[2], ymax=b[3]) for b in boxes]
        )
        for file, boxes in BOXES.items()
    ]
    globox.AnnotationSet(images).save_coco(folder / "annotations.json", auto_ids=True)


@annotations("label-studio-converter", "`convert_to_coco`, then `--data coco`", "label-studio-converter==0.0.59")
def by_label_studio(folder: Path) -> None:
    from label_studio_converter import Converter

    tasks = [
        {
            "id": i, "data": {"image": str(folder / "images" / file)},
            "annotations": [{"id": i, "result": [
                {
                    "from_name": "label", "to_name": "image", "type": "rectanglelabels", "original_width": 64,
                    "original_height": 64,
                    "value": {
                        "x": left / 0.64, "y": top / 0.64, "width": (right - left) / 0.64,
                        "height": (bottom - top) / 0.64, "rotation": 0, "rectanglelabels": [name],
                    },
                }
                for left, top, right, bottom, name in boxes
            ]}],
        }
        for i, (file, boxes) in enumerate(BOXES.items(), 1)
    ]  # fmt: skip
    (folder / "images/tasks.json").write_text(json.dumps(tasks))
    labels = "".join(f'<Label value="{name}"/>' for name in CLASSES)
    config = f"""<View><Image name="image" value="$image"/>
        <RectangleLabels name="label" toName="image">{labels}</RectangleLabels></View>"""
    converter = Converter(config, str(folder), download_resources=False)
    converter.convert_to_coco(str(folder / "images/tasks.json"), str(folder / "out"), is_dir=False)
    content = json.loads((folder / "out/result.json").read_text())
    for image in content["images"]:
        image["file_name"] = Path(image["file_name"]).name
    (folder / "annotations.json").write_text(json.dumps(content))


@annotations("datumaro", "`export('coco_instances')`, the file moved, then `--data coco`", "datumaro==1.13.12")
def by_datumaro(folder: Path) -> None:
    import datumaro

    items = []
    for file, boxes in BOXES.items():
        objects = [
            datumaro.Bbox(b[0], b[1], b[2] - b[0], b[3] - b[1], label=CLASSES.index(b[4]), id=k, group=k)
            for k, b in enumerate(boxes, 1)
        ]
        picture = datumaro.Image.from_file(path=str(folder / "images" / file))
        items.append(datumaro.DatasetItem(Path(file).stem, media=picture, annotations=objects))
    datumaro.Dataset.from_iterable(items, categories=list(CLASSES)).export(str(folder / "out"), "coco_instances")
    (written,) = (folder / "out/annotations").glob("*.json")
    (folder / "annotations.json").write_text(written.read_text())


@annotations("pycocotools", "`COCO(…).dataset` written as JSON, masks as RLE", "pycocotools")
def by_pycocotools(folder: Path) -> None:
    from pycocotools import mask

    rows: list[dict[str, Any]] = []
    for i, (_, boxes) in enumerate(BOXES.items()):
        for left, top, right, bottom, name in boxes:
            drawn = mask.frPyObjects([[left, top, right, top, right, bottom, left, bottom]], 64, 64)[0]
            row: dict[str, Any] = {"id": len(rows) + 1, "image_id": i, "category_id": CLASSES.index(name) + 1}
            row |= {"iscrowd": 0, "bbox": [left, top, right - left, bottom - top], "area": float(mask.area(drawn))}
            row |= {"segmentation": {"size": [64, 64], "counts": drawn["counts"].decode()}}
            rows.append(row)
    content = {"images": [{"id": i, "file_name": file, "width": 64, "height": 64} for i, file in enumerate(BOXES)]}
    content |= {"categories": [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)], "annotations": rows}
    (folder / "annotations.json").write_text(json.dumps(content))


@annotations(
    "supervision, Roboflow's layout", "`as_coco` into train/ and valid/, then `--data coco`", "supervision==0.31.2"
)
def by_roboflow(folder: Path) -> None:
    import supervision

    for part, files in (("train", ("a.png", "b.png")), ("valid", ("c.png",))):
        paths = {file: str(folder / "images" / file) for file in files}
        objects = {paths[file]: supervision.Detections(*arrays(file)[:1], class_id=arrays(file)[1]) for file in files}
        supervision.DetectionDataset(list(CLASSES), list(paths.values()), objects).as_coco(
            images_directory_path=str(folder / part), annotations_path=str(folder / part / "_annotations.coco.json")
        )


def by_panlabel(folder: Path, kind: str, content: str) -> None:
    """Convert an annotation file to COCO's JSON."""
    (folder / "export").write_text(content)
    command = [str(folder.resolve().parent / "packages/bin/panlabel"), "convert", "--from", kind, "--to", "coco"]
    command += ["--allow-lossy", "-i", str(folder / "export"), "-o", str(folder / "annotations.json")]
    subprocess.run(command, check=True)


@annotations("panlabel, from VIA", "`convert --from via --to coco`, then `--data coco`", "panlabel==0.7.0")
def by_via(folder: Path) -> None:
    content = {}
    for file, boxes in BOXES.items():
        path = folder / "images" / file
        shape = {"name": "rect", "x": 0.0, "y": 0.0, "width": 0.0, "height": 0.0}
        regions = [
            {
                "shape_attributes": shape | {"x": b[0], "y": b[1], "width": b[2] - b[0], "height": b[3] - b[1]},
                "region_attributes": {"label": b[4]},
            }
            for b in boxes
        ]
        size = path.stat().st_size
        content[f"{file}{size}"] = {"filename": file, "size": size, "regions": regions, "file_attributes": {}}
    for file in BOXES:
        shutil.copy(folder / "images" / file, folder)  # panlabel reads their sizes
    by_panlabel(folder, "via", json.dumps(content))
    for file in BOXES:
        (folder / file).unlink()


@annotations("panlabel, from CVAT", "`convert --from cvat --to coco`, then `--data coco`", "panlabel==0.7.0")
def by_cvat(folder: Path) -> None:
    rows = []
    for i, (file, boxes) in enumerate(BOXES.items()):
        inside = "".join(
            f'<box label="{name}" occluded="0" xtl="{left}" ytl="{top}" xbr="{right}" ybr="{bottom}" z_order="0"></box>'
            for left, top, right, bottom, name in boxes
        )
        rows.append(f'<image id="{i}" name="{file}" width="64" height="64">{inside}</image>')
    by_panlabel(folder, "cvat", f"<annotations><version>1.1</version>{''.join(rows)}</annotations>")
