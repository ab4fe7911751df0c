# SPDX-License-Identifier: Apache-2.0
"""Connections to the outside: configuration, engines, KV events, tokenizers, Redis."""
