"""The policy lab: the same traffic under many policies, in virtual time, with what may be concluded from it."""
