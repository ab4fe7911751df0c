# SPDX-License-Identifier: Apache-2.0
"""The manager process: one leader's work on Models, ModelInfers and scaling, and webhooks on every replica."""
