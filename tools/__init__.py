# SPDX-License-Identifier: Apache-2.0
"""Programs that write derived files; nothing that runs in production."""
