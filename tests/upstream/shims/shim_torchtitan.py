"""torchtitan: its own models, whose routed experts run on moe_aiter's kernels."""

import functools


def install(checkout):
    from torchtitan.models.common import moe

    from moe_aiter.integrations.torchtitan import convert

    init = moe.RoutedExperts.__init__

    @functools.wraps(init)
    def with_our_experts(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if type(self.inner_experts) is moe.GroupedExperts:
            convert(self)

    moe.RoutedExperts.__init__ = with_our_experts
