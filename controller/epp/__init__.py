# SPDX-License-Identifier: Apache-2.0
"""``attache epp``: both halves of an endpoint picker in one container, with the flags of llm-d's."""
