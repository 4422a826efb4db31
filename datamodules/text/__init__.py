"""Texts: plain ones, conversations, labelled ones, and those that a rule makes."""
