"""What is saved when nothing limits memory: the minimum cut under the rules."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.kinds import is_projection
from torchkiln.partition.network import Network, minimum_cut


def smallest_saved(info: NodeInfo, forbidden: Collection[Node]) -> frozenset[Node]:
    """The values with the fewest bytes from which backward is computed without recomputing a ``forbidden`` node.

    Inputs of forward are not among them: they are there anyway. Results of forward are, all of them: they cost nothing.
    """
    nodes = [node for node in info.nbytes if node.op not in ("placeholder", "output")]
    number = {node: k for k, node in enumerate(nodes)}
    stuck: set[Node] = set()
    for node in nodes:
        fixed = node not in info.recomputable or node in forbidden or node in info.kept
        if fixed or (is_projection(node) and node.args[0] in stuck):
            stuck.add(node)
    free = [node for node in nodes if node in info.savable and info.aliases.root(node) in info.alive_anyway]
    savable = info.savable.union(node for node in forbidden if node in info.views)
    sources = {node for node in (*stuck, *free) if node in savable}
    network = Network(
        # Among equals, not what forward would compute and write for backward alone.
        capacity=[info.nbytes[node] + (node in info.either) if node in savable else None for node in nodes],
        # What must not be recomputed is a source: what it was computed from does not matter.
        edges=[
            (number[source], number[node])
            for node in nodes
            if node not in sources
            for source in info.recompute_reads[node]
            if source in number
        ],
        sources=[number[node] for node in nodes if node in sources],
        sinks=[number[node] for node in info.read_by_backward if node in number],
    )
    return frozenset(free).union(nodes[k] for k in minimum_cut(network).values)
