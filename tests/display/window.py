"""A game that opens a window, fills it with one colour, and ends with its standard input:  window.py WIDTH HEIGHT RED GREEN BLUE"""

import sys

import pygame

width, height, *colour = map(int, sys.argv[1:])
pygame.display.init()
surface = pygame.display.set_mode((width, height))
surface.fill(colour)
pygame.draw.rect(surface, (255, 255, 255), (0, 0, 10, 20))  # at the top left
pygame.display.flip()
sys.stdout.write("drawn\n")
sys.stdout.flush()
sys.stdin.read()
