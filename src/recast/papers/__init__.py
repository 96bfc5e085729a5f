"""What only the papers need: networks, which `import recast.papers` registers with timm, and recipes."""

import recast.lab.networks
import recast.lab.tasks.detect
import recast.lab.tasks.segment
import recast.papers.deit.variants
import recast.papers.patchconvnet.network
import recast.papers.prs.network  # noqa: F401
from recast.models.names import PLUGINS

if __name__ not in PLUGINS:
    PLUGINS.append(__name__)
