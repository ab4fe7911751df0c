# SPDX-License-Identifier: Apache-2.0
"""Filters that Envoy skips for some requests or answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.type.matcher.v3 import HttpRequestHeaderMatchInput, HttpResponseHeaderMatchInput
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as XdsTypedExtensionConfig
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    RegexMatcher,
    RegexMatcherGoogleRe2,
    StringMatcher,
)

from controller.bundle.envoy.envoy_json import PackedMessage

if TYPE_CHECKING:
    from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig


def skip_filter_if(extension: TypedExtensionConfig, *conditions: MatcherMatcherListPredicate) -> ExtensionWithMatcher:
    """``extension``, skipped where one of the conditions holds; those of requests come first."""
    skip = MatcherOnMatch(action=XdsTypedExtensionConfig(name="skip", typed_config=PackedMessage(SkipFilter())))
    matchers = [MatcherMatcherListFieldMatcher(predicate=one, on_match=skip) for one in conditions]
    return ExtensionWithMatcher(
        xds_matcher=Matcher(matcher_list=MatcherMatcherList(matchers=matchers)), extension_config=extension
    )


def request_has(header: str, regex: str, *, but_not: bool = False) -> MatcherMatcherListPredicate:
    """``regex`` matches the whole value of the request's ``header``; ``but_not``: it does not."""
    one = _header_has(HttpRequestHeaderMatchInput(header_name=header), regex)
    return MatcherMatcherListPredicate(not_matcher=one) if but_not else one


def answer_has(header: str, regex: str) -> MatcherMatcherListPredicate:
    """``regex`` matches the whole value of the answer's ``header``."""
    return _header_has(HttpResponseHeaderMatchInput(header_name=header), regex)


def _header_has(
    value: HttpRequestHeaderMatchInput | HttpResponseHeaderMatchInput, regex: str
) -> MatcherMatcherListPredicate:
    return MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=XdsTypedExtensionConfig(name="header", typed_config=PackedMessage(value)),
            value_match=StringMatcher(safe_regex=RegexMatcher(google_re2=RegexMatcherGoogleRe2(), regex=regex)),
        )
    )
