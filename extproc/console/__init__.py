# SPDX-License-Identifier: Apache-2.0
"""The console: a page of the admin port that shows engines, queues, tenants, routes and recent requests, live."""
