"""Networks of our own, registered with timm by name, and `build`: a network from a name and a checkpoint."""

from recast.models import small as small  # registers its names: timm.create_model("cifar_resnet20") works from here on
