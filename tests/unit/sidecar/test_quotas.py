"""Quotas are hard: what is held never exceeds what was allowed, and what was given back can be taken again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import Quota, Size
from hicache.errors import ConfigError, LimitExceeded
from hicache.records import Tier
from hicache.sidecar.quotas import Quotas, agreed_quotas
from hicache.sidecar.settings import load_settings

TENANTS = ["a", "b", None]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "charge", "refund", "replace"]),
        st.sampled_from(TENANTS),
        st.sampled_from([Tier.HOST, Tier.STORAGE]),
        st.integers(0, 60),
    ),
    max_size=80,
)


@given(STEPS)
def test_random_histories(steps: list[tuple[str, str | None, Tier, int]]) -> None:
    """What is held equals the charges less the refunds, and no charge ever goes beyond the limit of its moment."""
    limits = {"a": Quota(host=Size(100), storage=Size(40)), "b": Quota(host=Size(0))}
    quotas, held = Quotas(limits), Counter[tuple[str | None, Tier]]()
    for what, tenant, tier, size in steps:
        quota = limits.get(tenant) if tenant else None
        limit = None if quota is None else (quota.host if tier is Tier.HOST else quota.storage)
        if what == "replace":
            limits = {"a": Quota(host=Size(size), storage=Size(size))}
            quotas.replace(limits)
        elif what == "refund":
            given_back = min(size, held[tenant, tier])
            quotas.refund(tenant, tier, given_back)
            held[tenant, tier] -= given_back
        elif limit is not None and held[tenant, tier] + size > limit:
            with pytest.raises(LimitExceeded):
                quotas.charge(tenant, tier, size)
        else:
            quotas.charge(tenant, tier, size)
            held[tenant, tier] += size
        for key, size_held in held.items():
            assert quotas.used(*key) == size_held
            left = quotas.left(*key)
            assert left is None or left >= 0
    assert {(t, tier): used for t, tier, used, _ in quotas.rows() if used} == {k: v for k, v in held.items() if v}


def test_the_refusal_has_the_numbers() -> None:
    """Nothing is taken, and the text says what is allowed, held and asked."""
    quotas = Quotas({"acme": Quota(host=Size(1 << 30))})
    quotas.charge("acme", Tier.HOST, 1 << 29)
    with pytest.raises(LimitExceeded, match="'acme' may hold 1 GiB in HOST and holds 512 MiB: 768 MiB more"):
        quotas.charge("acme", Tier.HOST, 3 << 28)
    assert quotas.left("acme", Tier.HOST) == 1 << 29
    quotas.charge("acme", Tier.STORAGE, 1 << 40)
    quotas.charge("acme", Tier.DEVICE, 1 << 40)


def test_a_quota_that_comes_later_begins_with_the_truth() -> None:
    """What a tenant without a quota holds was counted all the same."""
    quotas = Quotas()
    quotas.charge("acme", Tier.HOST, 10)
    quotas.replace({"acme": Quota(host=Size(8))})
    assert quotas.left("acme", Tier.HOST) == 0
    with pytest.raises(LimitExceeded):
        quotas.charge("acme", Tier.HOST, 1)
    quotas.refund("acme", Tier.HOST, 5)
    quotas.charge("acme", Tier.HOST, 3)


@pytest.mark.parametrize("size", [-1, 11])
def test_wrong_refunds_are_bugs(size: int) -> None:
    """More than was charged cannot be given back."""
    quotas = Quotas()
    quotas.charge("a", Tier.HOST, 10)
    with pytest.raises(ValueError, match="cannot be refunded, 10 are charged"):
        quotas.refund("a", Tier.HOST, size)
    with pytest.raises(ValueError, match="cannot be charged"):
        quotas.charge("a", Tier.HOST, -1)


def test_both_sources_of_quotas() -> None:
    """The configuration and the token file may each have some, and may not disagree."""
    config = load_settings(flags={"tenants.quotas": ("--set", '{"a": {"host": 5}}')}).config
    both = agreed_quotas(config, {"b": Quota(storage=Size(7)), "a": Quota(host=Size(5))})
    assert both == {"a": Quota(host=Size(5)), "b": Quota(storage=Size(7))}
    with pytest.raises(ConfigError, match="differ about tenant 'a'"):
        agreed_quotas(config, {"a": Quota(host=Size(6))})
