"""The networks of the papers: importing this registers them with timm."""

import recast.lab.networks
import recast.lab.tasks.detect
import recast.lab.tasks.segment
import recast.papers.deit.variants
import recast.papers.patchconvnet.network
import recast.papers.prs.network  # noqa: F401
