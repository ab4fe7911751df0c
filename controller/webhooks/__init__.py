# SPDX-License-Identifier: Apache-2.0
"""The admission webhooks' server, and the certificates that it shows; ``admission`` decides."""
