"""Where does a step's time go?"""
