"""Parts that modes share which see every operator."""


class NothingCompiled:
    """Put before a mode of PyTorch's: inside it nothing is compiled.

    So that PyTorch need not keep its compiler away from every call that the mode dispatches.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
