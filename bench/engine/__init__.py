# SPDX-License-Identifier: Apache-2.0
"""An engine that behaves like vLLM V1 without a GPU; it imports nothing else of bench."""
