#!/usr/bin/env bash
# label-studio-converter 0.0.59: a rectangle of 80×20 pixels, turned by 90 degrees, in a picture of 200×100.
# Expected: the box around it, 20×80, in COCO's and YOLO's format (or an error, since neither has rotation).
# Seen: COCO's box is turned in percent of width and height, so it has another shape unless the picture is square. YOLO's
# is the rectangle before it was turned.
#   turned by 0: COCO (100, 10, 80, 20), YOLO (100, 10, 80, 20)
#   turned by 90: COCO (60, 10, 40, 40), YOLO (100, 10, 80, 20); true (80, 10, 20, 80)
source "$(dirname "$0")/environment.sh" label-studio-converter==0.0.59 label-studio-tools==0.0.4 appdirs==1.4.4 \
    defusedxml ijson==3.2.3 lxml nltk regex ujson pillow==13.0.0 pandas requests numpy
"$python" -W ignore - <<'PY' 2>/dev/null
import json
from pathlib import Path

from label_studio_converter import Converter
from PIL import Image

WIDTH, HEIGHT = 200, 100
left, top, width, height = box = (100, 10, 80, 20)
Image.new("RGB", (WIDTH, HEIGHT)).save("a.png")
config = """<View><Image name="image" value="$image"/>
<RectangleLabels name="label" toName="image"><Label value="cat"/></RectangleLabels></View>"""
boxes = {}
for angle in (0, 90):  # about the upper left corner
    value = {
        "x": 100 * left / WIDTH, "y": 100 * top / HEIGHT, "width": 100 * width / WIDTH, "height": 100 * height / HEIGHT,
        "rotation": angle, "rectanglelabels": ["cat"],
    }
    result = {
        "from_name": "label", "to_name": "image", "type": "rectanglelabels", "original_width": WIDTH,
        "original_height": HEIGHT, "value": value,
    }
    task = {"id": 1, "data": {"image": "a.png"}, "annotations": [{"id": 1, "result": [result]}]}
    Path("tasks.json").write_text(json.dumps([task]))
    converter = Converter(config, ".", download_resources=False)
    converter.convert_to_coco("tasks.json", f"coco{angle}", is_dir=False)
    converter.convert_to_yolo("tasks.json", f"yolo{angle}", is_dir=False)
    (annotation,) = json.loads(Path(f"coco{angle}/result.json").read_text())["annotations"]
    (file,) = Path(f"yolo{angle}/labels").glob("*.txt")
    x, y, w, h = (float(number) for number in file.read_text().split()[1:])
    yolo = (x - w / 2) * WIDTH, (y - h / 2) * HEIGHT, w * WIDTH, h * HEIGHT
    boxes[angle] = [tuple(round(number) for number in row) for row in (annotation["bbox"], yolo)]
    print(f"turned by {angle}: COCO {boxes[angle][0]}, YOLO {boxes[angle][1]}", end="")
    print(f"; true {(left - height, top, height, width)}" if angle else "")
assert boxes == {0: [box, box], 90: [(60, 10, 40, 40), box]}
PY
