"""The work of one process of a pipeline, where processes of tests can import it."""

from benchmarks.pipeline_runs import Trained, Way, train


def counted(rank: int, count: int, way: Way) -> Trained:
    """Train as one of `count` stages, with bytes of tensors counted."""
    return train(way, rank, counted=True)
