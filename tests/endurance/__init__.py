"""What a relay process takes of its machine while it delivers for long.

``python -m tests.endurance`` runs the courses at full length and prints what it has seen; the tests
run shorter ones.
"""
