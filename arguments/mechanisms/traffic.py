"""What dispatchers send over which link, as the estimate reads it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangedTokens:
    """Tokens that a rank exchanges with the other expert ranks, as a dispatcher's `traffic` reads them.

    Attributes:
        num_bytes: bytes of the rank's tokens, each counted once.
        copies: experts of a token that process it.
        ep, etp: expert-parallel and expert-tensor-parallel ranks.
        domain: ranks with fast links between them.
        domains: number of domains that the expert ranks span.
        hit_ranks, hit_domains: mean number of ranks and domains that hold an expert of a token.
    """

    num_bytes: float
    copies: float
    ep: int
    etp: int
    domain: int
    domains: int
    hit_ranks: float
    hit_domains: float

    @property
    def outside(self) -> float:
        """Share of the domains that are others."""
        return (self.domains - 1) / self.domains

    @property
    def others_inside(self) -> float:
        """Share of the expert-parallel ranks of its domain that are others."""
        return 1 - 1 / min(self.ep, self.domain)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one exchange, by link.

    Attributes:
        network, nvlink: bytes between and inside domains.
        gathered: bytes that a ring over all expert ranks collects; nothing else is sent then.
        copies: copies of each token that the ranks of etp gather.
        by_nccl: NVLink is used by NCCL's all-to-all, not by the kernels of a library.
        is_sequential: the two links are used one after the other, instead of at the same time.
        slowdown: factor of the time.
    """

    network: float = 0.0
    nvlink: float = 0.0
    gathered: float = 0.0
    copies: float = 1.0
    by_nccl: bool = False
    is_sequential: bool = False
    slowdown: float = 1.0


def nothing(tokens: ExchangedTokens) -> Traffic:
    return Traffic(copies=tokens.copies)


def all_gather(tokens: ExchangedTokens) -> Traffic:
    return Traffic(gathered=tokens.num_bytes * tokens.ep * tokens.etp)


def every_copy(tokens: ExchangedTokens) -> Traffic:
    """All-to-all: a token is sent once for each of its experts."""
    network = tokens.num_bytes * tokens.copies * tokens.outside
    nvlink = tokens.num_bytes * tokens.copies * (1 - tokens.outside) * tokens.others_inside
    return Traffic(network, nvlink, copies=tokens.copies, by_nccl=True)


def once_per_domain(tokens: ExchangedTokens, slowdown: float = 1.0) -> Traffic:
    """Libraries: a token is sent once to each domain that holds one of its experts, and distributed there."""
    network = tokens.num_bytes * tokens.hit_domains * tokens.outside
    nvlink = tokens.num_bytes * tokens.hit_ranks * tokens.others_inside
    return Traffic(network, nvlink, copies=tokens.copies, slowdown=slowdown)


def two_steps(tokens: ExchangedTokens) -> Traffic:
    """Hierarchical: as a library, by two all-to-alls, one after the other."""
    once = once_per_domain(tokens)
    return Traffic(once.network, once.nvlink, copies=tokens.hit_ranks, by_nccl=True, is_sequential=True)
