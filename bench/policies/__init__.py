"""The field's endpoint picking policies, each after its documentation, code or paper, with its defaults."""
