// The game of the examples.

#ifndef CART_POLE_HPP
#define CART_POLE_HPP

#include <cmath>
#include <random>

// Cart-pole of Barto, Sutton and Anderson (1983), integrated with Euler's method.
class CartPole {
public:
    explicit CartPole(unsigned seed) : state_(), random_(seed) {
        std::uniform_real_distribution<float> near_zero(-0.05f, 0.05f);
        for (float& value : state_) value = near_zero(random_);
    }

    void push(bool right) {
        const float gravity = 9.8f, cart = 1.0f, pole = 0.1f, half_length = 0.5f, force = 10.0f, seconds = 0.02f;
        const float total = cart + pole, moment = pole * half_length;
        float& x = state_[0];
        float& speed = state_[1];
        float& angle = state_[2];
        float& turn = state_[3];
        const float sine = std::sin(angle), cosine = std::cos(angle);
        const float pressed = ((right ? force : -force) + moment * turn * turn * sine) / total;
        const float turning = (gravity * sine - cosine * pressed) / (half_length * (4.0f / 3.0f - pole * cosine * cosine / total));
        const float pushed = pressed - moment * turning * cosine / total;
        x += seconds * speed;
        speed += seconds * pushed;
        angle += seconds * turn;
        turn += seconds * turning;
    }

    bool fallen() const { return std::fabs(state_[0]) > 2.4f || std::fabs(state_[2]) > 12.0f * 3.14159265f / 180.0f; }
    const float* seen() const { return state_; }

private:
    float state_[4];
    std::mt19937 random_;
};

#endif
