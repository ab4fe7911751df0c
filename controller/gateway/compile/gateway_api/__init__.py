# SPDX-License-Identifier: Apache-2.0
"""Pure: objects of the Gateway API, with the pools and Services that they name, to documents and statuses."""
