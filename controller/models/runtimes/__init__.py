# SPDX-License-Identifier: Apache-2.0
"""How engines are started: presets, how one is chosen, and pod templates from typed fields."""
