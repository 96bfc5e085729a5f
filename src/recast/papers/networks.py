"""The networks and tasks of the papers: importing this registers them, networks with timm."""

import recast.models.cifar
import recast.papers.deit.variants
import recast.papers.dense.detect.networks
import recast.papers.dense.segment.networks
import recast.papers.grafit.network
import recast.papers.grafit.task
import recast.papers.patchconvnet.network
import recast.papers.prs.network  # noqa: F401
