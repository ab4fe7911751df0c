# SPDX-License-Identifier: Apache-2.0
"""What the manager's objects ask for, decided from what is there: pure functions of observed objects and time."""
