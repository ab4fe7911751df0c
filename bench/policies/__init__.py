"""The field's picking policies; knows engine and the observers of virtual."""
