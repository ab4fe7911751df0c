# SPDX-License-Identifier: Apache-2.0
"""From a request to the ModelServer that serves it."""
