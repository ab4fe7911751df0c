# SPDX-License-Identifier: Apache-2.0
"""The engine model against real engines; knows engine, virtual and reporting."""
