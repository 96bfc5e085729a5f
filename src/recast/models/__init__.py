"""Networks of our own, registered with timm by name, and `build`: a network from a name and a checkpoint."""

# registers their names: timm.create_model("cifar_resnet20") works from here on
from recast.models import cmhsa_vit as cmhsa_vit
from recast.models import detect as detect
from recast.models import patchconvnet as patchconvnet
from recast.models import segment as segment
from recast.models import small as small
from recast.models import variants as variants
