"""What only the papers need: networks, which `import recast.papers` registers with timm, tasks, and recipes."""

import recast.lab.networks
import recast.lab.tasks.detect.networks
import recast.lab.tasks.segment.networks
import recast.papers.deit.variants
import recast.papers.grafit.task
import recast.papers.patchconvnet.network
import recast.papers.prs.network  # noqa: F401
from recast.models.names import PLUGINS

if __name__ not in PLUGINS:
    PLUGINS.append(__name__)
