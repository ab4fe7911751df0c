# SPDX-License-Identifier: Apache-2.0
"""Programs that run in engines' pods: the downloader of weights and the runtime agent."""
