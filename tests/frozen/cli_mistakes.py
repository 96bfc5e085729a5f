"""Mistakes of a user on the command line and in Python: run by `test_mistakes.py`.

Commands run in a scratch folder that holds what `prepare` of `commands.py` lays out there: `weights.safetensors` of a
digits_resnet, `tiny.yaml`, a run of it in `run/`, `notes.txt`, `empty/` and a folder of images `images/`.
"""

from __future__ import annotations

Case = tuple[str, dict[str, str]]
"""A command line, and files (name → text) that it needs."""

SMALL = "digits_resnet --img-size 16"

COMMANDS = [
    "plans", "plan", "plan digits_resne", "plan timm:nothing_like_it", "plan torchvision:resnet19",
    "plan nowhere.module:net", "plan torch.nn:Nothing", "plan digits_resnet extra", "plan digits_resnet --wher all",
    f"plan {SMALL} --where layer9", f"plan {SMALL} --where stage:7", f"plan {SMALL} --where stage:x",
    f"plan {SMALL} --where re:[", f"plan {SMALL} --where layer3.0.conv1x", f"plan {SMALL} --where",
    f"plan {SMALL} --budget tokens=3", f"plan {SMALL} --budget macs=fast", f"plan {SMALL} --budget flops=3G",
    f"plan {SMALL} --budget memory=2XB", f"plan {SMALL} --budget tokens=0",
    f"plan {SMALL} --budget params=0.5x", "plan digits_resnet --img-size 16x", "plan digits_resnet --img-size 0",
    "plan digits_resnet --img-size 16x16x16", "plan digits_resnet --img-size -3", "plan digits_resnet --img-size",
    f"plan {SMALL} --num-classes ten", f"plan {SMALL} --num-classes 0", f"plan {SMALL} --pretrained",
    f"plan {SMALL} --checkpoint nowhere.safetensors",
    f"plan {SMALL} --checkpoint notes.txt", "plan cifar_resnet20 --checkpoint weights.safetensors",
    f"plan {SMALL} --out empty", f"plan {SMALL} --out nowhere/plan.json", f"plan {SMALL} --out notes.txt",
    f"plan {SMALL} --gate sigmoids", f"plan {SMALL} --gate sigmoid --gamma-init 0.5",
    f"plan {SMALL} --lambda-init 2", f"plan {SMALL} --alpha 0", f"plan {SMALL} --alpha many",
    f"plan {SMALL} --head-dim 0", f"plan {SMALL} --gate-range 1 0", f"plan {SMALL} --gate-range 1",
    f"plan {SMALL} --gate-range 0.5 1", f"plan {SMALL} --gamma-init nan", f"plan {SMALL} --bias-init 10",
    f"plan {SMALL} --gate bias --bias-init -1", f"plan {SMALL} --gate bias --content linear",
    f"plan {SMALL} --gate bias --alpha 2", f"plan {SMALL} --content softmx", f"plan {SMALL} --stride removed",
    f"plan {SMALL} --backend fastest", f"plan {SMALL} --recast gate=sigmoid", f"plan {SMALL} --pool double",
    f"plan {SMALL} --pool single --num-heads 0",
    f"plan {SMALL} --pool single --num-heads 7", f"plan {SMALL} --pool single --mlp-ratio 0",
    f"plan {SMALL} --pool single --init-values inf", f"plan {SMALL} --pool single --cls-in-keys",
    f"plan {SMALL} --pool.start papers", f"plan {SMALL} --where none", f"plan {SMALL} --json maybe",
    f"plan {SMALL} --plan nowhere.json", f"plan {SMALL} --plan notes.txt",
    "verify", f"verify {SMALL} --num-images 0", f"verify {SMALL} --device banana", f"verify {SMALL} --data-dir x",
    "verify digits_resnet --img-size 16x24 --data digits", f"verify {SMALL} --data digts",
    f"verify {SMALL} --seed one", f"verify {SMALL} --where none",
    "train", "train fintune", "train nowhere.yaml",
    "train tiny.yaml --config tiny.yaml", "train tiny.yaml --resume run", "train --resume run --out x",
    "train --resume empty", "train --resume nowhere", "train tiny.yaml --out run", "train tiny.yaml --out notes.txt",
    "train attention_pool --model digits_resnet", "train tiny.yaml --plan notes.txt", "train tiny.yaml --optim x",
    "evaluate", "evaluate nowhere", "evaluate empty", "evaluate run --suite claen", "evaluate run --suite clean,pdg",
    "evaluate run --num-images 0", "evaluate run --num-images 10000", "evaluate run --eps -1",
    "evaluate run --eps big", "evaluate run --steps 0", "evaluate run --restarts 0", "evaluate run --step-size 0",
    "evaluate run --seed -1", "evaluate run --batch-size 0", "evaluate run --neighbours 0",
    "evaluate run --suite resolution --sizes 16x",
    "evaluate run --device banana", "evaluate run --suite imagenet-a --sets nowhere", "evaluate run empty",
    "explain", "explain nowhere_net images", "explain run nowhere.png", "explain run notes.txt",
    "explain run val:100000", "explain run val:x", "explain run empty", "explain run --num-images 0",
    "explain run images/a.png --pretrained", "explain run images/a.png --classes notes.txt",
    "explain run images/a.png --layer layer9", "explain run images/a.png --out page.txt",
    "explain run images/a.png --out nowhere/page.html", "explain run images/a.png --img-size 8x",
    "explain digits_resnet", "explain digits_resnet images/a.png --mean 0.5",
    "explain digits_resnet images/a.png --classes nowhere.txt", "explain digits_resnet images/a.png --crop-pct 2",
    "explain digits_resnet images/a.png --std 0 0 0", "explain digits_resnet val:3",
    "explain weights.safetensors images/a.png", "explain run images/a.png --device banana",
    "report", "report nowhere", "report empty", "report run run", "report run --out empty",
    "report run --out nowhere/report.html", "report run --figures images", "report run --figure x",
    "quickstart --out notes.txt", "quickstart --out run", "quickstart --out images", "quickstart --resume --out empty",
    "quickstart --seed one", "quickstart --epochs 1", "quickstart now",
]  # fmt: skip

OPTIONS = (
    """
--data digts | --data folder | --data folder --data-dir nowhere | --data folder --data-dir empty | --data cifar10
--data zip --data-dir notes.txt | --data torch/Nothing | --model digits_resne | --num-classes 3 | --opt adamwx
--num-classes 3 --new-head false | --where layer9 | --budget tokens=3 | --device banana | --amp fp8 | --gate linears
--lambda-init 2 | --batch-size 0 | --batch-size half | --batch-size 2.5 | --img-size 0 | --test-size 0
--num-train 0 | --num-val 0 | --num-train 5 | --num-train 100000 | --input-size 0 | --repeats 0 | --base-batch 0
--teacher-size 0 | --accumulate 0 | --accumulate 3 | --save-steps 0 | --keep 0 | --keep-every 0 | --probe-images 0
--workers -1 | --calibrate 8 | --calibrate -1 --gate sigmoid | --recalibrate-bn -1 | --epochs -1 | --epochs few
--conv-epochs -1 | --color-jitter -1 | --mixup -0.1 | --cutmix nan | --lr -1 | --lr fast | --gate-lr -1 | --pool-lr -1
--weight-decay -1 | --warmup-epochs -1 | --warmup-lr -1 | --min-lr inf | --gate-l1 -1 | --layer-scale -1
--feature-epochs -1 | --feature-epochs 9 | --clip-grad 0 | --optim.eps 0 | --temperature 0 | --std 0 0 0
--mean 0.5 | --mean a b c | --erasing 2 | --mix-prob 2 | --mix-switch-prob -1 | --teacher-weight 1.5
--label-smoothing 1 | --bce-threshold 1 | --drop-path 1 | --ema-decay 1 | --momentum 1 | --betas 0.9 1 | --betas 0.9
--layer-decay 0 | --crop-pct 0 | --data-fraction 0 | --data-fraction 2 | --scale 0 1 | --scale 1 0.5 | --val-fraction 1
--crop middle | --auto-augment randy | --mix-mode both | --loss mse | --drop-path-mode square | --freeze head
--freeze trunk | --targets medium | --reduction sum | --bad-image ignore | --order random | --order first_first
--schedule someday | --schedule listed | --schedule listed --dates 1:layer9 | --schedule listed --dates 7:layer3.*
--schedule listed --dates soon:layer3.* | --schedule at_once --conv-epochs 5 | --conv-epochs 1 | --dates 1:layer3.*
--schedule learned --stride remove | --schedule progressive --where none | --schedule progressive --recalibrate-bn 8
--schedule progressive --order learned --stride dilate | --schedule listed --dates 1:layer3.* 2:layer3.0.*
--distill parents | --distill nothing_like_it | --teacher-checkpoint nowhere.pth --distill parent
--trackers mlflow | --control maybe | --seed x | --checkpoint nowhere.safetensors | --checkpoint null --pretrained
--pool double | --pool per_class --num-heads 3 | --pool single --cls-in-keys
--grad-checkpointing | --mixup 0.8 --batch-size 15 --accumulate 5
--cutmix 1 --batch-size 20 --accumulate 4 | --loss bce --bce-threshold -1 | --nonsense 1 | --optim.lrr 1 | --lr
--flip perhaps | --layer-scale 0.1
""".strip()
    .replace("\n", " | ")
    .split(" | ")
)
"""Options of `recast train tiny.yaml`, each a mistake."""

MODEL = "model: {name: digits_resnet}\n"
YAML = {
    "an unknown key": "optim: {lrr: 1}\n",
    "an unknown section": "optimizer: {lr: 1}\n",
    "a nested unknown key": MODEL + "recast: {gates: sigmoid}\n",
    "a list": "- model\n- data\n",
    "text": "just words\n",
    "nothing": "",
    "no YAML": "model: {name: digits_resnet\n",
    "a list where a mapping belongs": "model: [digits_resnet]\n",
    "a mapping where a list belongs": MODEL + "where: {last: stage}\n",
    "a word for a whole number": MODEL + "epochs: many\n",
    "a fraction for a whole number": MODEL + "epochs: 2.5\n",
    "a truth for a whole number": MODEL + "epochs: true\n",
    "a word for a number": MODEL + "optim: {lr: fast}\n",
    "a number for a word": "model: {name: 18}\n",
    "a word for a truth": MODEL + "control: maybe\n",
    "none of the choices": MODEL + "recast: {gate: sigmoids}\n",
    "a pair of three": MODEL + "augment: {scale: [0.1, 0.5, 1]}\n",
    "a number for a pair": MODEL + "optim: {betas: 0.9}\n",
    "null where there is no default": MODEL + "epochs: null\n",
    "a list of wrong items": MODEL + "data: {mean: [a, b, c]}\n",
    "gates that clash": MODEL + "recast: {gate: linear, lambda_init: 2}\n",
    "pool that clashes": MODEL + "pool: {kind: single, start: average, cls_in_keys: true}\n",
    "calibrate without the sigmoid": MODEL + "calibrate: 100\n",
    "negative epochs": MODEL + "epochs: -1\n",
    "a tracker that is none": MODEL + "trackers: [mlflow]\n",
    "nan": MODEL + "optim: {lr: .nan}\n",
}

STEP = '{"name": "layer3.1.conv1"}'
PLANS = {
    "no JSON": "{",
    "a list": "[]",
    "no keys": "{}",
    "an unknown version": '{"version": 99, "config": {}, "steps": []}',
    "steps that are no list": '{"version": 5, "config": {}, "steps": {}}',
    "a step without a name": '{"version": 5, "config": {}, "steps": [{"nam": "layer3.1.conv1"}]}',
    "a step of no layer": '{"version": 5, "config": {}, "steps": [{"name": "layer9"}]}',
    "a step twice": f'{{"version": 5, "config": {{}}, "steps": [{STEP}, {STEP}]}}',
    "an unknown setting": f'{{"version": 5, "config": {{"gates": "x"}}, "steps": [{STEP}]}}',
    "a wrong setting": f'{{"version": 5, "config": {{"gate": "x"}}, "steps": [{STEP}]}}',
    "a wrong pool": f'{{"version": 5, "config": {{}}, "pool": {{"kind": "x"}}, "steps": [{STEP}]}}',
}
GOOD_PLAN = f'{{"version": 5, "config": {{}}, "steps": [{STEP}]}}'


def cases() -> list[Case]:
    """Every mistaken command line, with the files it needs."""
    found: list[Case] = [(line, {}) for line in COMMANDS]
    found += [(f"train tiny.yaml {options} --out new", {}) for options in OPTIONS]
    found += [("train bad.yaml --out new", {"bad.yaml": text}) for text in YAML.values()]
    found += [(f"plan {SMALL} --plan edited.json", {"edited.json": text}) for text in PLANS.values()]
    for more in ("--where all", "--budget tokens=9", "--gate sigmoid", "--pool single"):
        found.append((f"plan {SMALL} --plan edited.json {more}", {"edited.json": GOOD_PLAN}))
    found.append(("train tiny.yaml --plan edited.json --where all --out new", {"edited.json": GOOD_PLAN}))
    return found


API = {
    # name: a snippet; `net()` is a small network, `x` an image for it, `folder` a scratch folder
    "gate": "recast.RecastConfig(gate='sigmoids')",
    "alpha": "recast.RecastConfig(alpha=-1.0)",
    "content": "recast.RecastConfig(content='quadratic')",
    "stride": "recast.RecastConfig(stride='drop')",
    "backend": "recast.RecastConfig(backend='slow')",
    "head_dim": "recast.RecastConfig(head_dim=0)",
    "gate_range": "recast.RecastConfig(gate_range=(1.0, 0.0))",
    "gate_range start": "recast.RecastConfig(gate_range=(0.5, 1.0))",
    "lambda of linear": "recast.RecastConfig(lambda_init=2.0)",
    "gamma of sigmoid": "recast.RecastConfig(gate='sigmoid', gamma_init=0.1)",
    "bias of linear": "recast.RecastConfig(bias_init=5.0)",
    "bias with content": "recast.RecastConfig(gate='bias', content='linear')",
    "pool kind": "recast.PoolConfig(kind='max')",
    "pool start": "recast.PoolConfig(kind='single', start='mean')",
    "pool heads": "recast.PoolConfig(kind='single', num_heads=0)",
    "pool keys": "recast.PoolConfig(kind='single', cls_in_keys=True)",
    "geometry kernel": "recast.Geometry((0, 3))",
    "geometry mode": "recast.Geometry((3, 3), padding_mode='mirror')",
    "geometry size": "recast.Geometry((3, 3)).output_size(2, 2)",
    "gpsa channels": "recast.GPSA(3, 4, recast.Geometry((3, 3)))(torch.zeros(1, 5, 8, 8))",
    "gpsa small": "recast.GPSA(3, 4, recast.Geometry((3, 3)))(torch.zeros(1, 3, 2, 2))",
    "gpsa dimensions": "recast.GPSA(3, 4, recast.Geometry((3, 3)))(torch.zeros(3, 8))",
    "gpsa groups": "recast.GPSA(3, 4, recast.Geometry((3, 3)), groups=2)",
    "gpsa of bias": "recast.GPSA(3, 4, recast.Geometry((3, 3)), config=recast.RecastConfig(gate='bias'))",
    "cmhsa of linear": "recast.CMHSA(3, 4, recast.Geometry((3, 3)), config=recast.RecastConfig())",
    "cmhsa channels": "recast.CMHSA(3, 4, recast.Geometry((3, 3)))(torch.zeros(1, 5, 8, 8))",
    "plan no convolution": "recast.plan(nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), x)",
    "plan one by one": "recast.plan(nn.Conv2d(3, 4, 1), x)",
    "plan where": "recast.plan(net(), x, where='layer9')",
    "plan where type": "recast.plan(net(), x, where=3)",
    "plan predicate": "recast.plan(net(), x, where=lambda name, module: False)",
    "plan budget": "recast.plan(net(), x, budget='flops=1')",
    "plan tokens": "recast.plan(net(), x, budget=0)",
    "plan too little": "recast.plan(net(), x, budget='macs=1.0x')",
    "plan example": "recast.plan(net(), torch.zeros(1, 5, 16, 16))",
    "plan example type": "recast.plan(net(), 'cat.jpg')",
    "plan pool": "recast.plan(net(), x, where='none')",
    "recast twice": "m = net(); p = recast.plan(m, x); recast.recast_(m, p); recast.recast_(m, p)",
    "recast other": "recast.recast_(nn.Sequential(nn.Conv2d(3, 4, 3)), recast.plan(net(), x))",
    "plan twice": "m = net(); recast.recast_(m, recast.plan(m, x)); recast.plan(m, x)",
    "verify shapes": "recast.verify(net(), net(classes=3), x)",
    "verify example": "recast.verify(net(), net(), torch.zeros(1, 5, 16, 16))",
    "verify backend": "recast.verify(net(), net(), x, backend='slow')",
    "load absent": "recast.load(folder / 'nowhere.safetensors', net())",
    "load text": "(folder / 'a.safetensors').write_text('no'); recast.load(folder / 'a.safetensors', net())",
    "load plain": "safetensors.torch.save_file(net().state_dict(), folder / 'b.safetensors'); "
    "recast.load(folder / 'b.safetensors', net())",
    "load other": "m = net(); recast.recast_(m, recast.plan(m, x)); recast.save(m, folder / 'c.safetensors'); "
    "recast.load(folder / 'c.safetensors', net(classes=3))",
    "load recast": "m = net(); recast.recast_(m, recast.plan(m, x)); recast.save(m, folder / 'd.safetensors'); "
    "recast.load(folder / 'd.safetensors', m)",
    "calibrate plain": "recast.calibrate_(net(), net(), [x])",
    "pool plain": "recast.attention_pool_(nn.Sequential(nn.Conv2d(3, 4, 3)), config=recast.PoolConfig(kind='single'))",
    "schedule epoch": "recast.Schedule.at_once(recast.plan(net(), x), 0)",
    "schedule order": "recast.Schedule.progressive(recast.plan(net(), x), 10, 'random')",
    "schedule epochs": "recast.Schedule.progressive(recast.plan(net(), x), 0)",
    "schedule name": "recast.Schedule.listed(recast.plan(net(), x), {1: ['layer9']})",
    "schedule two": "recast.Schedule.listed(recast.plan(net(), x), {1: ['layer3.0.*'], 2: ['*']})",
    "schedule decided": "recast.Schedule.learned(recast.plan(net(), x)).decided('layer9', 3)",
    "plan json": "recast.Plan.from_json('{')",
    "plan json list": "recast.Plan.from_json('[]')",
    "plan json version": "recast.Plan.from_json('{\"version\": 99}')",
    "evaluate suite": "recast.lab.evaluation.evaluate(net(), 'claen', data)",
    "evaluate none": "recast.lab.evaluation.evaluate(net(), [], data)",
}
