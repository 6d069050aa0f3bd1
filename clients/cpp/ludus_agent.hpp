// An agent for games whose frames must not wait: the sessions of one agent, one after another, on top of ludus.hpp. Needs C++11.
//
//     ludus::AgentLoop loop(options);                              // starts a thread, which makes all requests
//     while (running) {                                            // a frame
//         loop.update(now);
//         if (decision_is_due && loop.ready()) loop.decide(out.begin(reward).f32s(seen, 4).body());
//         if (loop.take_action(bytes)) action = ludus::RawReader(bytes).i64();
//         apply(action);                                           // the last one stays in force
//         if (over) loop.end_episode(out.begin(reward, true).f32s(seen, 4).body());
//     }
//
// If the server is not there, restarts or loses the session, the loop tries again and begins a new session; the game goes on. Like
// ludus.hpp it throws nothing itself and compiles with -fno-exceptions -fno-rtti. Tested on Linux.

#ifndef LUDUS_AGENT_HPP
#define LUDUS_AGENT_HPP

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "ludus.hpp"

namespace ludus {

// What every session of an agent starts with; see Session.
struct AgentSettings {
    std::string match, side, model;
    double temperature;
    std::string start_body;

    AgentSettings() : temperature(-1), start_body(raw_start()) {}
};

namespace detail {

enum class Request { None, Start, Tick, End };

// Between the thread of the frames and that of the requests.
struct AgentMailbox {
    std::mutex lock;
    std::condition_variable changed;
    Request request;  // to be made, or under way
    std::string body;
    bool answered;  // reply and ok belong to the request
    bool ok;
    Reply reply;
    bool quit;
    std::string last;  // body of the end, if the episode has ended
    bool gone;         // the thread has made its last request

    AgentMailbox() : request(Request::None), answered(false), ok(false), quit(false), gone(false) {}
};

class AgentWorker {
public:
    AgentWorker(std::shared_ptr<AgentMailbox> mail, const Options& options, const AgentSettings& settings)
        : mail_(std::move(mail)), client_(options), settings_(settings), unanswered_(false) {}

    void run() {
        std::unique_lock<std::mutex> hold(mail_->lock);
        while (true) {
            mail_->changed.wait(hold, [this] { return due() || mail_->quit; });
            if (!due()) break;
            const Request request = mail_->request;
            const std::string body = mail_->body;
            hold.unlock();
            Reply reply;
            const bool ok = ask(request, body, reply);
            hold.lock();
            mail_->reply = std::move(reply);
            mail_->ok = ok;
            mail_->answered = true;
            mail_->changed.notify_all();
        }
        const std::string last = mail_->last;
        hold.unlock();
        Reply ignored;
        if (session_ && session_->open()) client_.end(*session_, last, ignored);
        hold.lock();
        mail_->gone = true;
        mail_->changed.notify_all();
    }

private:
    bool due() const { return mail_->request != Request::None && !mail_->answered; }

    bool ask(Request request, const std::string& body, Reply& reply) {
        if (request == Request::Tick) return client_.tick(*session_, body, reply);
        if (request == Request::End) return client_.end(*session_, body, reply);
        if (!unanswered_) {  // otherwise the same session again: then the start counts once
            session_.reset(new Session());
            session_->match = settings_.match;
            session_->side = settings_.side;
            session_->model = settings_.model;
            session_->temperature = settings_.temperature;
        }
        const bool ok = client_.start(*session_, settings_.start_body, reply);
        unanswered_ = !ok && reply.error == Error::Unreachable;
        return ok;
    }

    std::shared_ptr<AgentMailbox> mail_;
    Client client_;
    AgentSettings settings_;
    std::unique_ptr<Session> session_;
    bool unanswered_;
};

}  // namespace detail

// All members are for one thread, that of the frames. Times are seconds of a clock that never goes back.
class AgentLoop {
public:
    explicit AgentLoop(const Options& options, const AgentSettings& settings = AgentSettings())
        : mail_(std::make_shared<detail::AgentMailbox>()),
          open_(false),
          ticked_(false),
          ending_(false),
          waiting_(false),
          has_action_(false),
          closed_(false),
          paused_(false),
          repeating_(false),
          failures_(0),
          losses_(0),
          retry_at_(0),
          episodes_(0),
          lost_(0),
          missed_(0) {
        auto worker = std::make_shared<detail::AgentWorker>(mail_, options, settings);
        std::thread([worker] { worker->run(); }).detach();  // it ends by itself, so that nobody has to wait for its last request
    }

    ~AgentLoop() { close(0); }
    AgentLoop(const AgentLoop&) = delete;
    AgentLoop& operator=(const AgentLoop&) = delete;

    // A session is open, and its episode goes on.
    bool playing() const { return open_ && !ending_; }
    // decide may be called.
    bool ready() const { return playing() && !waiting_ && !paused_ && !closed_; }
    // The open session has had a decision, which the next reward belongs to.
    bool ticked() const { return open_ && ticked_; }
    // Why the last request failed, other than by its deadline; error is None after one that succeeded.
    const Reply& failure() const { return failure_; }
    // Sessions that ended with their episode; that the server no longer had; ticks that missed their deadline.
    std::uint64_t episodes() const { return episodes_; }
    std::uint64_t lost() const { return lost_; }
    std::uint64_t missed() const { return missed_; }

    // Take the result of the pending request, and make the next one that is due. Never blocks for the network.
    void update(double now) {
        if (closed_) return;
        if (waiting_ && !take_reply(now)) return;
        if (now >= retry_at_) paused_ = false;
        if (waiting_ || paused_) return;
        if (!open_)
            send(detail::Request::Start, std::string());
        else if (ending_)
            send(detail::Request::End, last_);
    }

    // Wait for the pending request, for games that run in step with the server. Does not wait for one that is repeated.
    void wait(double now) {
        if (!waiting_ || repeating_ || closed_) return;
        {
            std::unique_lock<std::mutex> hold(mail_->lock);
            mail_->changed.wait(hold, [this] { return mail_->answered; });
        }
        update(now);
    }

    // Request an action for an observation: the body of a tick. Only when ready.
    void decide(const std::string& body) {
        if (!ready()) return;
        ticked_ = true;
        send(detail::Request::Tick, body);
    }

    // Whether an action has arrived since the last call.
    bool take_action(std::string& action) {
        if (!has_action_) return false;
        action.swap(action_);
        has_action_ = false;
        return true;
    }

    // End the episode with the body of the last step; a pending decision is dropped. The next session begins by itself.
    void end_episode(const std::string& body) {
        if (!playing() || !ticked_) return;  // the server has seen nothing of this episode: its session serves for the next one
        has_action_ = false;
        ending_ = true;
        last_ = body;
    }

    // End the open session in the background; nothing is requested after it. Returns whether that was done within the time.
    bool close(int wait_ms) {
        closed_ = true;
        std::unique_lock<std::mutex> hold(mail_->lock);
        if (ending_) mail_->last = last_;
        mail_->quit = true;
        mail_->changed.notify_all();
        return mail_->changed.wait_for(hold, std::chrono::milliseconds(wait_ms), [this] { return mail_->gone; });
    }

private:
    void send(detail::Request request, const std::string& body) {
        waiting_ = true;
        std::lock_guard<std::mutex> hold(mail_->lock);
        mail_->request = request;
        mail_->body = body;
        mail_->answered = false;
        mail_->changed.notify_all();
    }

    bool take_reply(double now) {
        detail::Request request;
        Reply reply;
        bool ok;
        {
            std::lock_guard<std::mutex> hold(mail_->lock);
            if (!mail_->answered) return false;
            request = mail_->request;
            reply = std::move(mail_->reply);
            ok = mail_->ok;
            mail_->request = detail::Request::None;
            mail_->answered = false;
        }
        waiting_ = false;
        if (ok)
            succeed(request, reply);
        else
            fail(request, reply, now);
        return true;
    }

    void succeed(detail::Request request, Reply& reply) {
        repeating_ = false;
        failure_ = Reply();
        if (request != detail::Request::Start) failures_ = losses_ = 0;  // a server may start sessions and then lose them all
        if (request == detail::Request::Start) {
            open_ = true;
            ticked_ = false;
        } else if (request == detail::Request::End) {
            ++episodes_;
            drop();
        } else {
            if (reply.missed) ++missed_;
            if (ending_ || reply.body.empty()) return;
            action_.swap(reply.body);
            has_action_ = true;
        }
    }

    void fail(detail::Request request, const Reply& reply, double now) {
        if (reply.error == Error::Deadline && request == detail::Request::Tick) {
            ++missed_;
            return;  // the session goes on
        }
        failure_ = reply;
        if (reply.error == Error::Lost) {
            ++lost_;
            drop();
            if (++losses_ == 1) return;  // the server is there: a new session at once
        }
        const bool again = reply.error == Error::Unreachable || reply.status == 429 || reply.status == 503;
        if (request == detail::Request::End && !again) drop();  // refused: repeating would not help
        const double pause = std::min(8.0, 0.25 * static_cast<double>(1 << std::min(failures_, 10)));
        ++failures_;
        paused_ = repeating_ = true;
        retry_at_ = now + (reply.retry_after_s >= 0 ? reply.retry_after_s : pause);
    }

    void drop() {
        open_ = ending_ = has_action_ = false;
        last_.clear();
    }

    std::shared_ptr<detail::AgentMailbox> mail_;
    bool open_, ticked_, ending_, waiting_, has_action_;
    std::string last_, action_;
    bool closed_;
    bool paused_;     // until retry_at_, after a failure
    bool repeating_;  // no request has succeeded since a failure
    int failures_;    // since the last tick or end that succeeded
    int losses_;      // of sessions, likewise
    double retry_at_;
    Reply failure_;
    std::uint64_t episodes_, lost_, missed_;
};

}  // namespace ludus

#endif
