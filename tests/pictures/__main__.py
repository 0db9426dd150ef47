"""`python -m tests.pictures`: draw the pictures of the documentation anew."""

from tests.pictures.backlogs import draw_backlogs
from tests.pictures.desk import draw_desk

draw_backlogs()
draw_desk()
