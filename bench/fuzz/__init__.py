# SPDX-License-Identifier: Apache-2.0
"""Broken input at random: requests, files, engines' answers, KV events, Redis, objects of a cluster."""
