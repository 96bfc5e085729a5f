"""The networks, tasks and suites of the papers: importing this registers them, networks with timm."""

import recast.models.cifar
import recast.papers.deit.suites
import recast.papers.deit.variants
import recast.papers.dense.detect.networks
import recast.papers.dense.segment.networks
import recast.papers.grafit.network
import recast.papers.grafit.retrieval
import recast.papers.grafit.suites
import recast.papers.grafit.task
import recast.papers.patchconvnet.network
import recast.papers.prs.network  # noqa: F401
