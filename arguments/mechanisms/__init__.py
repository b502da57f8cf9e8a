"""Mechanisms: one declaration each, of everything that rules, estimate, proof, doctor and manual ask of them."""
